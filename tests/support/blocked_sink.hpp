/// A log sink that does not return.
#pragma once

#include "foundation/log.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <mutex>
#include <string>
#include <vector>

namespace troupe::testing {

/// Lets other threads pass once it is open.
class one_way_gate {
public:
  void open() { promise_.set_value(); }
  void pass() const { opened_.wait(); }
  bool is_open() const {
    return opened_.wait_for(std::chrono::seconds{0}) == std::future_status::ready;
  }

private:
  std::promise<void> promise_;
  const std::shared_future<void> opened_ = promise_.get_future().share();
};

/// Blocks its first call, and collects the lines.
class blocked_sink {
public:
  blocked_sink() {
    set_log_sink([this](const log_line& x) {
      if (!entered_.is_open())
        entered_.open();
      held_.pass();
      std::lock_guard lock{mutex_};
      all_.emplace_back(x.text);
    });
    detail::log(log_level::info, "first");
    entered_.pass();
  }
  ~blocked_sink() {
    open();
    set_log_sink({});
  }
  blocked_sink(const blocked_sink&) = delete;
  blocked_sink& operator=(const blocked_sink&) = delete;

  void open() {
    if (!held_.is_open())
      held_.open();
  }
  /// Lets the lines through. Returns them, with those that say how many were left out.
  std::vector<std::string> end() {
    open();
    EXPECT_TRUE(detail::drain_log(std::chrono::seconds{30}));
    set_log_sink({});
    std::lock_guard lock{mutex_};
    return all_;
  }

private:
  one_way_gate entered_;
  one_way_gate held_;
  std::mutex mutex_;
  std::vector<std::string> all_;
};

} // namespace troupe::testing
