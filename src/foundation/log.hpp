/// Logging for the library's own code.
#pragma once

#include <troupe/error.hpp>
#include <troupe/log.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace troupe::detail {

/// The subject of a line. Peers can cause any number of lines of all kinds but `any`. So these are
/// limited, each kind by itself (`log_limit`).
enum class log_kind : std::uint8_t {
  any,
  strangers,    ///< connections without a certificate
  certificates, ///< connections with a certificate that end before the host is accepted
  members,      ///< hosts that join and leave
  notes         ///< messages between programs in different processes
};
inline constexpr std::size_t log_kind_count = 5;

// These functions queue a line for the log's thread. They never wait for the sink, unless the
// system provides no thread, in a process made by `fork`, and at the end of the process. They never
// throw. If the sink throws, the line goes to stderr.

void log(log_level level, std::string_view text, log_kind kind = log_kind::any) noexcept;

/// Logs a failure with all its fields.
void log(log_level level, std::string_view what, const caf::error& why,
         log_kind kind = log_kind::any) noexcept;

/// Blocks until the sink has got all lines that were logged before. Returns false if it has not
/// after `limit`, and at once if the sink itself is the caller.
bool drain_log(std::chrono::nanoseconds limit) noexcept;

/// For tests: sets the time in which the lines of each kind are limited.
void set_log_window(std::chrono::nanoseconds x) noexcept;

/// Returns whether the caller is the log's sink.
bool is_in_log_sink() noexcept;

/// Flushes spdlog's default logger. A sink of the user is not flushed.
void flush_log() noexcept;

} // namespace troupe::detail
