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

/// A function that gets the log lines, on any thread, including lanes, until the process ends. It
/// must not block for long, nor use static objects that are destroyed earlier. If it throws, the
/// line goes to stderr, with the text of the exception.
using log_sink = std::function<void(const log_line&)>;

/// Replaces the sink of the process; an empty one restores the default, spdlog's default logger.
void set_log_sink(log_sink sink);

} // namespace troupe
