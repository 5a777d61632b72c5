/// An executor whose tasks run when a test says so.
#pragma once

#include "support/world_fixture.hpp"
#include <troupe/pending.hpp>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace troupe::testing {

/// Runs tasks on the thread that calls run_one().
class manual_executor final : public executor {
public:
  void post(std::function<void()> task) override {
    std::lock_guard lock{mutex_};
    tasks_.push_back(std::move(task));
    condition_.notify_one();
  }
  /// Waits for a task and runs it.
  void run_one() {
    std::unique_lock lock{mutex_};
    if (!condition_.wait_for(lock, patience, [this] { return !tasks_.empty(); }))
      throw std::runtime_error("no task came");
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
  }

private:
  std::mutex mutex_;
  std::condition_variable condition_;
  std::deque<std::function<void()>> tasks_;
};

} // namespace troupe::testing
