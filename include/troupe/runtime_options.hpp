/// Knobs of the lanes; the defaults fit the machine.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace troupe {

/// How a lane learns that work is done. A backend that signals completions needs none of them.
enum class completion_strategy : std::uint8_t {
  event_poll,  ///< asks the oldest event of each stream
  host_func,   ///< a host function wakes the lane, which then asks; 20 us slower, no spinning; for
               ///< devices in worker processes as `event_poll`
  synchronize, ///< waits for each operation as soon as it is issued; for debugging
};

struct lane_options {
  completion_strategy completion = completion_strategy::event_poll;
  /// How long a lane spins after its last work before it parks. By default 200 us where there are
  /// at least two cores per device, and two more, else 0.
  std::optional<std::chrono::microseconds> spin = {};
  /// How long a client that waits for an answer spins before it parks: to wake a parked thread
  /// costs tens of microseconds, which is several percent of an operation of a millisecond. By
  /// default 10 ms where lanes spin, else 0. Of the whole process: the last actor system's counts.
  std::optional<std::chrono::microseconds> client_spin = {};
  /// Operations that a device may have in its streams. The launch queue holds about 1,024 entries.
  std::size_t in_flight_limit = 256;
  /// Operations that may wait for a place; callers of more wait for room (`room_policy`), or are
  /// answered with `errc::overloaded`. For callers that must not block the bound is 16 times this.
  std::size_t queue_limit = 4096;
  /// Pinned memory for each direction of pageable copies, per device. @units bytes
  std::size_t staging_bytes = std::size_t{16} << 20;
  /// Attempts to bring a device up, and the pause after the first failure; it doubles each time.
  int open_attempts = 5;
  std::chrono::milliseconds open_backoff{100};
};

/// When something fails that ends a communicator, a device or all work with CUDA, the last
/// operations of every device are written to a file (docs/flight-recorder.md), each cause once.
struct flight_record_options {
  /// Empty: nothing is written. "%p" in it becomes the process's number. The first record goes
  /// there; the next ones get ".2", ".3" and so on at the end of their names. Files that are there
  /// already are replaced.
  std::string path = {};
  /// At most so many files; when all are written, each new record replaces the last one.
  std::size_t files = 8;
};

} // namespace troupe
