/// A thread that runs one job after the other.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <stop_token>
#include <thread>
#include <utility>

namespace troupe::detail {

/// @thread any
class serial_thread {
public:
  serial_thread() : thread_([this](const std::stop_token& stop) { run(stop); }) {}
  /// Waits for the running job, and drops the jobs behind it. Not called in a job.
  ~serial_thread() = default;

  void post(std::function<void()> job) {
    {
      std::lock_guard lock{mutex_};
      jobs_.push_back(std::move(job));
    }
    condition_.notify_one();
  }
  /// Returns whether no job runs or waits.
  bool is_idle() const {
    std::lock_guard lock{mutex_};
    return jobs_.empty() && !busy_;
  }

private:
  void run(const std::stop_token& stop) {
    for (std::unique_lock lock{mutex_};;) {
      condition_.wait(lock, stop, [this] { return !jobs_.empty(); });
      if (stop.stop_requested())
        return;
      auto job = std::move(jobs_.front());
      jobs_.pop_front();
      busy_ = true;
      lock.unlock();
      job();
      job = nullptr; // its captures are destroyed without the lock
      lock.lock();
      busy_ = false;
    }
  }

  mutable std::mutex mutex_;
  std::condition_variable_any condition_;
  std::deque<std::function<void()>> jobs_;
  bool busy_ = false;
  std::jthread thread_; // last: it uses the other members
};

} // namespace troupe::detail
