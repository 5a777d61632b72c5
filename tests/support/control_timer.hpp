/// What a late answer is judged against.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace troupe::testing {

/// How late threads of this machine wake that wait until a point in time, as the library's
/// timekeeper does. There are several, for what happens to one need not be seen in another.
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
