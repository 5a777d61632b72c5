/// Limits of blocking system calls.
#pragma once

#include <chrono>

namespace troupe::detail {

using time_limit = std::chrono::steady_clock::time_point;
inline constexpr time_limit no_limit = time_limit::max();

/// Returns the time-out for `poll`: milliseconds, rounded up; -1 for `no_limit`.
int poll_limit(time_limit until) noexcept;

} // namespace troupe::detail
