/// Waiting for a time without blocking a thread.
#pragma once

#include <troupe/pending.hpp>

#include <chrono>

namespace troupe {

/// Completes when `time` has passed; at once if it is not positive. In a task or an actor's task:
/// `co_await troupe::after(500us)`. With `when_any` it is a time-out for several requests.
/// Cancelling it ends it at once.
/// @thread any
/// @errors errc::cancelled; errc::unavailable: the system gives no thread for the timers
pending<void> after(std::chrono::nanoseconds time);

} // namespace troupe
