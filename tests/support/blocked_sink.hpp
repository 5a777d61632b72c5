/// A log sink that does not return.
#pragma once

#include "foundation/log.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <limits>
#include <mutex>
#include <string>
#include <vector>

namespace troupe::testing {

/// Collects lines. Its calls wait until they may return. Its first line is "first".
class blocked_sink {
public:
  blocked_sink() {
    set_log_sink([this](const log_line& x) {
      std::unique_lock lock{mutex_};
      ++calls_;
      changed_.notify_all();
      changed_.wait(lock, [this] { return may_return_ >= calls_; });
      all_.emplace_back(x.text);
    });
    detail::log(log_level::info, "first");
    wait_calls(1);
  }
  ~blocked_sink() { static_cast<void>(end()); }
  blocked_sink(const blocked_sink&) = delete;
  blocked_sink& operator=(const blocked_sink&) = delete;

  /// Lets this number of calls return, from the first one on.
  void let(std::size_t calls) {
    std::lock_guard lock{mutex_};
    may_return_ = calls;
    changed_.notify_all();
  }
  void let_all() { let(std::numeric_limits<std::size_t>::max()); }
  /// Waits until this number of calls has begun.
  void wait_calls(std::size_t number) {
    std::unique_lock lock{mutex_};
    EXPECT_TRUE(
        changed_.wait_for(lock, std::chrono::seconds{30}, [&] { return calls_ >= number; }));
  }
  /// Lets all lines through. Returns them, with those that say how many were left out.
  std::vector<std::string> end() {
    let_all();
    EXPECT_TRUE(detail::drain_log(std::chrono::seconds{30}));
    set_log_sink({});
    std::lock_guard lock{mutex_};
    return all_;
  }

private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t calls_ = 0;
  std::size_t may_return_ = 0;
  std::vector<std::string> all_;
};

} // namespace troupe::testing
