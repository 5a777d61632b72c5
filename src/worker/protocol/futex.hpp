/// Waiting for a word in shared memory, across processes.
#pragma once

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace troupe::detail {

/// Returns when `word` is not `expected`, after `futex_wake_all`, after `limit`, or spuriously.
inline void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected,
                       std::chrono::nanoseconds limit) noexcept {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  const timespec time{static_cast<std::time_t>(seconds.count()),
                      static_cast<long>((limit - seconds).count())};
  // The caller checks its condition again.
  static_cast<void>(::syscall(SYS_futex, &word, FUTEX_WAIT, expected, &time, nullptr, 0));
}

inline void futex_wake_all(std::atomic<std::uint32_t>& word) noexcept {
  static_cast<void>(::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0));
}

/// A word that one side rings. The other side sleeps on it.
struct bell {
  std::atomic<std::uint32_t> rung{0};
  std::atomic<std::uint32_t> sleepers{0};

  /// Wakes the sleeping side, which then sees everything that was written before.
  void ring() noexcept {
    rung.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0)
      futex_wake_all(rung);
  }
  /// Does the same. Without a sleeper it only costs the writer a fence and a load.
  void ring_sleepers() noexcept {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_relaxed) != 0)
      ring();
  }
  /// Sleeps until it is rung or `limit` is over. Returns at once if `ready()` holds.
  template <class F> void sleep(std::chrono::nanoseconds limit, F ready) noexcept {
    const auto now = rung.load(std::memory_order_seq_cst);
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!ready())
      futex_wait(rung, now, limit);
    sleepers.fetch_sub(1, std::memory_order_relaxed);
  }
};

} // namespace troupe::detail
