/// The library's own way to its log.
#pragma once

#include <troupe/error.hpp>
#include <troupe/log.hpp>

#include <string_view>

namespace troupe::detail {

/// Never throws. A line whose sink throws goes to stderr.
void log(log_level level, std::string_view text) noexcept;

/// A failure with all its fields.
void log(log_level level, std::string_view what, const caf::error& why) noexcept;

/// Has spdlog's default logger write what it still holds; a sink of the user's holds what it wants.
void flush_log() noexcept;

} // namespace troupe::detail
