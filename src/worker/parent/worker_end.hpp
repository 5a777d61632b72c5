/// How a worker's process ended.
#pragma once

#include "worker/protocol/worker_page.hpp"

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace troupe::detail {

enum class end_cause : std::uint8_t {
  died,    ///< by itself: a signal, or an exit without releasing the life line
  let_go,  ///< it released its life line on purpose, and is about to end
  hung_up, ///< it closed its socket, though its life line is held
  stuck,   ///< its beats stood still, and it was killed
  busy,    ///< it was inside one call for too long, and was killed
  killed   ///< by its owner
};

enum class noticed_by : std::uint8_t {
  life_line, ///< at once
  socket,    ///< when its files were closed
  process,   ///< when all of it was gone
  heartbeat  ///< it was killed and is still there
};

std::string_view to_string(noticed_by x) noexcept;

/// A worker's end, as known when it is noticed. The process may take time to go. Its resources,
/// device memory too, are free only after it was reaped.
struct worker_end {
  end_cause cause = end_cause::died;
  noticed_by noticed = noticed_by::life_line;
  std::chrono::steady_clock::time_point when;
  std::optional<worker_report> report; ///< from the worker itself
  std::uint32_t call = 0;              ///< of a busy worker: `work_progress::call`
};

/// How a process ended. Both values are unknown if other code has reaped it.
struct worker_exit {
  int status = -1; ///< -1: it did not exit
  int signal = 0;  ///< 0: no signal ended it
};

/// Returns a text such as "status 3" or "signal 9".
std::string to_string(const worker_exit& x);

} // namespace troupe::detail
