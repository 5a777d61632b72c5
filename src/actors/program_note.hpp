/// What a world and its ranks' processes tell each other.
#pragma once

#include <troupe/error.hpp>
#include <troupe/world_status.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace troupe::detail {

struct program_note {
  enum class kind : std::uint8_t {
    enter = 1, ///< with a rank: goes on with its communicator, as `view` says
    leave,     ///< `view.epoch` ends because of `why`; to both sides
    stop,      ///< the world ends
    message,   ///< `bytes`, to the program's actor
    report,    ///< `bytes`, from it
    ended,     ///< it ended because of `why`
    ready,     ///< from its process, of `generation`: it has begun, or has the last message
  };

  kind what{};
  std::uint64_t world = 0;
  std::int32_t rank = -1;
  std::int32_t ranks = 0;
  std::uint64_t generation = 0;
  world_status view;
  std::string program;
  std::vector<std::uint8_t> bytes; ///< see `check_program_bytes`
  caf::error why;
  // of `world_limits`
  std::int64_t deadline_ns = 0;
  std::int64_t stall_limit_ns = 0;
  std::int64_t quiet_limit_ms = 0;
  std::uint64_t waiting_limit = 0;
};

std::vector<std::byte> to_bytes(const program_note& x);
/// None: they make no sense.
std::optional<program_note> program_note_of(std::span<const std::byte> bytes);

/// @errors errc::invalid_argument: more than `most_program_bytes`, which are `what`
caf::error check_program_bytes(std::size_t size, const char* what);

} // namespace troupe::detail
