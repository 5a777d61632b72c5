/// Numbers of threads.
#pragma once

#include <atomic>
#include <cstdint>

namespace troupe::detail {

/// Returns the number of this thread, from 1. Unlike a `std::thread::id`, it is not used again
/// after the thread's end.
/// @thread any
inline std::uint64_t thread_number() noexcept {
  static std::atomic<std::uint64_t> last{0};
  thread_local const std::uint64_t number = ++last;
  return number;
}

} // namespace troupe::detail
