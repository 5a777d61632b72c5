/// The destination of the library's log.
#pragma once

#include <troupe/error.hpp>

#include <cstdint>
#include <functional>
#include <string_view>

namespace troupe {

enum class log_level : std::uint8_t { debug, info, warning, error };

/// One log line. After a failure, `why` has device, rank, operation, epoch and generation as
/// fields; otherwise it is null.
struct log_line {
  log_level level;
  std::string_view text;
  const failure* why;
};

/// A function that gets the log lines, one call at a time, until the process ends. A thread of the
/// library makes the calls, so a sink that blocks or is slow delays no other work. If the system
/// provides no thread for the log, and in a process made by `fork`, the thread that logs makes
/// them.
///
/// - Up to 1,000 lines or 1 MiB wait for the sink. Further ones are left out.
/// - Of the lines that other hosts and processes can cause in any number, such as refused
///   connections, 20 of each kind are logged in 10 s. The others are left out.
/// - A later line says how many were left out.
/// - When the process ends in good order, it waits until the sink has all lines: for at most 500 ms
///   in all, 250 ms in `exit_process`, and 100 ms in a worker.
///
/// The sink must not use static objects that are destroyed earlier. It may call the library. If it
/// throws, the line goes to stderr, with the text of the exception.
using log_sink = std::function<void(const log_line&)>;

/// Replaces the sink of the process; an empty one restores the default, spdlog's default logger.
/// Blocks until the old sink has got the lines that wait, for at most a second, and until it is not
/// in a call. Afterwards it is not called any more. So the caller must not hold a lock that the old
/// sink takes. A sink may replace itself.
void set_log_sink(log_sink sink);

} // namespace troupe
