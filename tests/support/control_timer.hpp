/// What a late answer is judged against.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace troupe::testing {

/// How late a thread of this machine wakes that waits until a point in time, as the library's
/// timekeeper does.
class control_timer {
public:
  control_timer() : thread_([this] { run(); }) {}
  ~control_timer() {
    {
      std::lock_guard lock{mutex_};
      stop_ = true;
    }
    condition_.notify_one();
    thread_.join();
  }
  std::chrono::steady_clock::duration worst() {
    std::lock_guard lock{mutex_};
    return worst_;
  }

private:
  void run() {
    std::unique_lock lock{mutex_};
    while (!stop_) {
      auto due = std::chrono::steady_clock::now() + std::chrono::milliseconds{2};
      if (!condition_.wait_until(lock, due, [this] { return stop_; }))
        worst_ = std::max(worst_, std::chrono::steady_clock::now() - due);
    }
  }

  std::mutex mutex_;
  std::condition_variable condition_;
  bool stop_ = false;
  std::chrono::steady_clock::duration worst_{};
  std::thread thread_;
};

} // namespace troupe::testing
