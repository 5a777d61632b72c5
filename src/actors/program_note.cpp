#include "actors/program_note.hpp"

#include "foundation/error_text.hpp"
#include "foundation/wire.hpp"
#include <troupe/nccl_world.hpp>
#include <troupe/worker_program.hpp>

#include <cstdint>

namespace troupe::detail {

void wire_fields(auto& wire, message_of<world_status> auto& x) {
  wire(x.name, x.phase, x.epoch, x.membership, x.members, x.reason, x.standby_ready);
  wire.require(x.phase <= world_phase::shut_down);
}

void wire_fields(auto& wire, message_of<program_note> auto& x) {
  wire(x.what, x.world, x.rank, x.ranks, x.incarnation, x.view, x.program, x.bytes, x.why, x.way,
       x.deadline_ns, x.stall_limit_ns, x.quiet_limit_ms, x.waiting_limit);
  wire.require(x.what >= program_note::kind::adopt && x.what <= program_note::kind::not_kept);
  wire.require(x.way <= collective_way::direct);
  if (x.what < program_note::kind::keep)
    return;
  wire(x.number, x.name, x.memory);
  wire.require(!check_kept(x.name, x.memory.type, x.memory.count));
}

caf::error check_program_bytes(std::size_t size, const char* what) {
  if (size <= most_program_bytes)
    return {};
  return make_error(errc::invalid_argument, std::string{what} + " of " + std::to_string(size) +
                                                " bytes; it may have " +
                                                std::to_string(most_program_bytes));
}

caf::error check_kept(const std::string& name, dtype type, std::size_t count) {
  if (name.empty() || name.size() > most_kept_name_bytes)
    return make_error(errc::invalid_argument, "a name of " + std::to_string(name.size()) +
                                                  " bytes; it must have 1 to " +
                                                  std::to_string(most_kept_name_bytes));
  if (!is_dtype(type))
    return make_error(errc::invalid_argument, unknown_dtype(type));
  if (count == 0)
    return make_error(errc::invalid_argument, "the buffer \"" + name + "\" without elements");
  if (count > SIZE_MAX / size_of(type))
    return make_error(errc::out_of_memory, size_overflows(count, type));
  return {};
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
