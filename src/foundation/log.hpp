/// Logging for the library's own code.
#pragma once

#include <troupe/error.hpp>
#include <troupe/log.hpp>

#include <string_view>

namespace troupe::detail {

/// Writes a line to the log. Never throws. If the sink throws, the line goes to stderr.
void log(log_level level, std::string_view text) noexcept;

/// Logs a failure with all its fields.
void log(log_level level, std::string_view what, const caf::error& why) noexcept;

/// Flushes spdlog's default logger. A sink of the user is not flushed.
void flush_log() noexcept;

} // namespace troupe::detail
