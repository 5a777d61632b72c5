/// Spins for a short time before a thread sleeps: waking a parked thread takes 10 to 40 us.
#pragma once

#include <troupe/detail/completion.hpp>

#include <algorithm>
#include <chrono>
#include <mutex>

namespace troupe::detail {

inline void pause() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Spins until `done()` is true, or for `time`; returns whether it is. Without `time` asks once.
template <class F> bool spin_until(F done, std::chrono::nanoseconds time) noexcept {
  if (done())
    return true;
  if (time.count() == 0)
    return false;
  auto end = clock::now() + time;
  do {
    for (int i = 0; i < 16; ++i) {
      if (done())
        return true;
      pause();
    }
  } while (clock::now() < end);
  return done();
}

/// How long clients spin for an answer before they park; 0 on few cores.
std::chrono::nanoseconds client_spin() noexcept;

/// Locks a mutex that other threads hold for about 1 us: spins before it blocks.
inline void lock_hot(std::mutex& mutex) noexcept {
  constexpr std::chrono::nanoseconds patience = std::chrono::microseconds{20};
  if (!spin_until([&] { return mutex.try_lock(); }, std::min(patience, client_spin())))
    mutex.lock();
}

/// Holds a mutex that `lock_hot` has locked.
class hot_lock {
public:
  explicit hot_lock(std::mutex& mutex) noexcept : mutex_(mutex) { lock_hot(mutex_); }
  ~hot_lock() { mutex_.unlock(); }
  hot_lock(const hot_lock&) = delete;
  hot_lock& operator=(const hot_lock&) = delete;

private:
  std::mutex& mutex_;
};
/// Sets `client_spin` for the whole process.
void set_client_spin(std::chrono::nanoseconds time) noexcept;

/// Spins until it has the flag, which is held for a few instructions.
class flag_lock {
public:
  explicit flag_lock(std::atomic_flag& flag) noexcept : flag_(flag) {
    while (flag_.test_and_set(std::memory_order_acquire))
      pause();
  }
  ~flag_lock() { flag_.clear(std::memory_order_release); }
  flag_lock(const flag_lock&) = delete;
  flag_lock& operator=(const flag_lock&) = delete;

private:
  std::atomic_flag& flag_;
};

} // namespace troupe::detail
