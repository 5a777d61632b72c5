#include "actors/program_note.hpp"

#include "foundation/wire.hpp"
#include <troupe/nccl_world.hpp>

namespace troupe::detail {

void wire_fields(auto& wire, message_of<world_status> auto& x) {
  wire(x.name, x.phase, x.epoch, x.membership, x.members, x.reason, x.standby_ready);
  wire.require(x.phase <= world_phase::shut_down);
}

void wire_fields(auto& wire, message_of<program_note> auto& x) {
  wire(x.what, x.world, x.rank, x.ranks, x.incarnation, x.view, x.program, x.bytes, x.why, x.way,
       x.deadline_ns, x.stall_limit_ns, x.quiet_limit_ms, x.waiting_limit);
  wire.require(x.what >= program_note::kind::adopt && x.what <= program_note::kind::ready);
  wire.require(x.way <= collective_way::direct);
}

caf::error check_program_bytes(std::size_t size, const char* what) {
  if (size <= most_program_bytes)
    return {};
  return make_error(errc::invalid_argument, std::string{what} + " of " + std::to_string(size) +
                                                " bytes; it may have " +
                                                std::to_string(most_program_bytes));
}

std::vector<std::byte> to_bytes(const program_note& x) {
  wire_writer to;
  to.put(x);
  return {to.bytes().begin(), to.bytes().end()};
}

std::optional<program_note> program_note_of(std::span<const std::byte> bytes) {
  return read_message<program_note>(bytes);
}

} // namespace troupe::detail
