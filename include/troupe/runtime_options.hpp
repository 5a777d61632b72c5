/// Options of lanes and of flight records. The default spin times depend on the number of cores.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace troupe {

/// How a lane detects that work is done. A backend that signals completions ignores it.
enum class completion_strategy : std::uint8_t {
  event_poll,  ///< polls the oldest event of each stream
  host_func,   ///< a host function wakes the lane, which then polls; 20 us slower, but no spinning;
               ///< devices in worker processes use `event_poll` instead
  synchronize, ///< waits for each operation as soon as it is issued; for debugging
};

struct lane_options {
  completion_strategy completion = completion_strategy::event_poll;
  /// How long a lane spins after its last work before it parks. Default: 200 us if the machine has
  /// at least two cores per device plus two, else 0.
  std::optional<std::chrono::microseconds> spin = {};
  /// How long a client thread that waits for a result spins before it parks. Waking a parked thread
  /// costs tens of microseconds, several percent of an operation of one millisecond. Default: 10 ms
  /// if lanes spin, else 0. It applies to the whole process: the last actor system's value counts.
  std::optional<std::chrono::microseconds> client_spin = {};
  /// Maximum number of operations in a device's streams. The launch queue holds about 1,024.
  std::size_t in_flight_limit = 256;
  /// Maximum number of operations of a device that wait to be issued. If it is reached, callers
  /// wait for room (`room_policy`) or get `errc::overloaded`. For callers that must not block, the
  /// limit is 16 times this.
  std::size_t queue_limit = 4096;
  /// Pinned memory per device and direction for copies of pageable memory. @units bytes
  std::size_t staging_bytes = std::size_t{16} << 20;
  /// Attempts to open a device, and the pause after the first failed one; each next pause doubles.
  int open_attempts = 5;
  std::chrono::milliseconds open_backoff{100};
};

/// When a failure ends a communicator, a device or all CUDA work, the last operations of every
/// device are written to a file (docs/flight-recorder.md), once per cause.
struct flight_record_options {
  /// Path of the first record; empty: no records. "%p" in it becomes the process id. The next
  /// records have ".2", ".3" and so on appended to their names. Existing files are replaced.
  std::string path = {};
  /// Maximum number of files. When all are written, each new record replaces the last one.
  std::size_t files = 8;
};

} // namespace troupe
