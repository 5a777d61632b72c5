/// Messages between a world and the processes of its ranks.
#pragma once

#include <troupe/collective.hpp>
#include <troupe/dtype.hpp>
#include <troupe/error.hpp>
#include <troupe/gpu_ref.hpp>
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
    adopt = 1,  ///< with a rank: it goes on with its communicator, as `view` says
    fail_epoch, ///< the communicator of `view.epoch` ends because of `why`; to both sides
    stop,       ///< the world ends
    message,    ///< `bytes`, to the program's actor
    report,     ///< `bytes`, from the program's actor
    ended,      ///< the program's actor ended because of `why`
    ready,      ///< from the process, of `incarnation`: the program began, or has the last message
    keep,       ///< from the process: asks for its memory of `name`, with `memory.type` and `count`
    kept,       ///< the reply to `keep`: `memory`, which was there
    kept_new,   ///< the reply to `keep`: `memory`, which is new
    not_kept,   ///< the reply to `keep`: there is none, because of `why`
  };

  kind what{};
  std::uint64_t world = 0;
  std::int32_t rank = -1;
  std::int32_t ranks = 0;
  std::uint64_t incarnation = 0;
  world_status view;
  std::string program;
  std::vector<std::uint8_t> bytes; ///< see `check_program_bytes`
  caf::error why;
  collective_way way = collective_way::nccl; ///< of all collectives
  // of `world_limits`
  std::int64_t deadline_ns = 0;
  std::int64_t stall_limit_ns = 0;
  std::int64_t quiet_limit_ms = 0;
  std::uint64_t waiting_limit = 0;
  // of `keep` and its replies
  std::uint64_t number = 0; ///< of the request, given by the process
  std::string name;
  gpu_token memory;
};

std::vector<std::byte> to_bytes(const program_note& x);
/// Returns none if the bytes are not valid.
std::optional<program_note> program_note_of(std::span<const std::byte> bytes);

/// @errors errc::invalid_argument: more than `most_program_bytes`; `what` names the bytes
caf::error check_program_bytes(std::size_t size, const char* what);
/// @errors errc::invalid_argument, errc::out_of_memory: there can be no such named buffer
caf::error check_kept(const std::string& name, dtype type, std::size_t count);

} // namespace troupe::detail
