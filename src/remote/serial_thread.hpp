/// A thread that runs one job after the other.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace troupe::detail {

/// @thread any
class serial_thread {
public:
  serial_thread() : thread_([this] { run(); }) {}
  /// Waits for the running job, and drops the jobs behind it. Not called in a job.
  ~serial_thread() { stop(); }
  serial_thread(const serial_thread&) = delete;
  serial_thread& operator=(const serial_thread&) = delete;

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
  /// Does the same as the destructor. At most one call.
  void stop() {
    {
      std::lock_guard lock{mutex_};
      stop_ = true;
    }
    condition_.notify_one();
    if (thread_.joinable())
      thread_.join();
  }

private:
  void run() {
    for (std::unique_lock lock{mutex_};;) {
      condition_.wait(lock, [this] { return stop_ || !jobs_.empty(); });
      if (stop_)
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
  std::condition_variable condition_;
  std::deque<std::function<void()>> jobs_;
  bool busy_ = false;
  bool stop_ = false;
  std::thread thread_; // last: it uses the other members
};

} // namespace troupe::detail
