/// Reference for the lateness of results.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace troupe::testing {

/// Measures how late threads of this machine wake from a timed wait, as the library's
/// deadline_watch does. There are several threads, because a delay of one thread need not affect
/// the others.
class control_timer {
public:
  using clock = std::chrono::steady_clock;

  control_timer() {
    for (auto& x : threads_)
      x = std::thread{[this] { run(); }};
  }
  ~control_timer() {
    {
      std::lock_guard lock{mutex_};
      stop_ = true;
    }
    condition_.notify_all();
    for (auto& x : threads_)
      x.join();
  }
  control_timer(const control_timer&) = delete;
  control_timer& operator=(const control_timer&) = delete;

  clock::duration worst() {
    std::lock_guard lock{mutex_};
    return worst_;
  }

private:
  static constexpr std::chrono::milliseconds period{2};

  void run() {
    std::unique_lock lock{mutex_};
    while (!stop_) {
      auto due = clock::now() + period;
      if (!condition_.wait_until(lock, due, [this] { return stop_; }))
        worst_ = std::max(worst_, clock::now() - due);
    }
  }

  std::mutex mutex_;
  std::condition_variable condition_;
  bool stop_ = false;
  clock::duration worst_{};
  std::array<std::thread, 4> threads_;
};

} // namespace troupe::testing
