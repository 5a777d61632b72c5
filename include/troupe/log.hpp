/// Where the library's log goes.
#pragma once

#include <troupe/error.hpp>

#include <cstdint>
#include <functional>
#include <string_view>

namespace troupe {

enum class log_level : std::uint8_t { debug, info, warning, error };

/// One line. `why` has device, rank, operation, epoch and generation as fields, where there was a
/// failure.
struct log_line {
  log_level level;
  std::string_view text;
  const failure* why;
};

/// Called on any thread, lanes included, until the process ends: it must not block for long, and
/// nothing that it uses may be a static object that is destroyed before. If it throws, the line
/// goes to stderr, with the text of the exception.
using log_sink = std::function<void(const log_line&)>;

/// Replaces the sink of the process; an empty one restores the default, spdlog's default logger.
void set_log_sink(log_sink sink);

} // namespace troupe
