#include "actors/program_note.hpp"

#include "foundation/wire.hpp"
#include <troupe/nccl_world.hpp>
#include <troupe/world_status.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace troupe::detail {

namespace {

void put(wire_writer& to, const world_status& x) {
  to.put(x.name);
  to.put(x.phase);
  to.put(x.epoch);
  to.put(x.membership);
  to.put_all(std::span<const world_member>{x.members});
  put(to, x.reason);
  to.put(x.standby_ready);
  to.put(x.windows);
  put(to, x.windows_reason);
}

world_status get_status(wire_reader& from) {
  world_status result;
  result.name = from.get_string();
  result.phase = from.get<world_phase>();
  result.epoch = from.get<std::uint64_t>();
  result.membership = from.get<std::uint64_t>();
  result.members = from.get_all<world_member>();
  result.reason = get_error(from);
  result.standby_ready = from.get<bool>();
  result.windows = from.get<std::uint64_t>();
  result.windows_reason = get_error(from);
  if (result.phase > world_phase::shut_down)
    from.fail();
  return result;
}

} // namespace

caf::error check_program_bytes(std::size_t size, const char* what) {
  if (size <= most_program_bytes)
    return {};
  return make_error(errc::invalid_argument, std::string{what} + " of " + std::to_string(size) +
                                                " bytes; it may have " +
                                                std::to_string(most_program_bytes));
}

std::vector<std::byte> to_bytes(const program_note& x) {
  wire_writer to;
  to.put(x.what);
  to.put(x.world);
  to.put(x.rank);
  to.put(x.ranks);
  to.put(x.generation);
  put(to, x.view);
  to.put(x.program);
  to.put_bytes(std::as_bytes(std::span{x.bytes}));
  put(to, x.why);
  to.put(x.deadline_ns);
  to.put(x.stall_limit_ns);
  to.put(x.quiet_limit_ms);
  to.put(x.waiting_limit);
  return {to.bytes().begin(), to.bytes().end()};
}

std::optional<program_note> program_note_of(std::span<const std::byte> bytes) {
  wire_reader from{bytes};
  program_note x;
  x.what = from.get<program_note::kind>();
  x.world = from.get<std::uint64_t>();
  x.rank = from.get<std::int32_t>();
  x.ranks = from.get<std::int32_t>();
  x.generation = from.get<std::uint64_t>();
  x.view = get_status(from);
  x.program = from.get_string();
  x.bytes = from.get_all<std::uint8_t>();
  x.why = get_error(from);
  x.deadline_ns = from.get<std::int64_t>();
  x.stall_limit_ns = from.get<std::int64_t>();
  x.quiet_limit_ms = from.get<std::int64_t>();
  x.waiting_limit = from.get<std::uint64_t>();
  const bool is_kind = x.what >= program_note::kind::enter && x.what <= program_note::kind::ready;
  if (!is_kind || !from.ok() || !from.at_end())
    return std::nullopt;
  return x;
}

} // namespace troupe::detail
