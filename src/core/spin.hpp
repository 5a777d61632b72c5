/// Waiting a little before sleeping: a parked thread costs 10 to 40 microseconds to wake.
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

/// True as soon as `done()` is; false after `time`. Without `time` asks just once.
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

/// Holds a mutex that others hold for a microsecond: waits for it awake before it sleeps.
class hot_lock {
public:
  explicit hot_lock(std::mutex& mutex) noexcept : mutex_(mutex) {
    constexpr std::chrono::nanoseconds patience = std::chrono::microseconds{20};
    if (!spin_until([&] { return mutex_.try_lock(); }, std::min(patience, client_spin())))
      mutex_.lock();
  }
  ~hot_lock() { mutex_.unlock(); }
  hot_lock(const hot_lock&) = delete;
  hot_lock& operator=(const hot_lock&) = delete;

private:
  std::mutex& mutex_;
};
/// Takes effect for the whole process.
void set_client_spin(std::chrono::nanoseconds time) noexcept;

} // namespace troupe::detail
