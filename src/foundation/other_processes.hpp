#pragma once

#include <atomic>
#include <cstdint>

namespace troupe::detail {

// A thread that sends something to another process happens before a thread that receives a result
// of it. The thread sanitizer sees only this process; these two functions show it that order.

inline std::atomic<std::uint64_t> told_other_processes{0};

/// @thread any
inline void before_telling_another_process() noexcept {
  told_other_processes.fetch_add(1, std::memory_order_release);
}

/// @thread any
inline void after_hearing_from_another_process() noexcept {
  static_cast<void>(told_other_processes.load(std::memory_order_acquire));
}

} // namespace troupe::detail
