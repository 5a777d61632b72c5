#pragma once

#include <atomic>
#include <cstdint>

namespace troupe::detail {

// A thread that tells another process something comes before a thread that hears from there what
// followed from it. The thread sanitizer sees this process alone: these two show it that order.

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
