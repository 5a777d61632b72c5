#pragma once

#include "foundation/log.hpp"
#include "foundation/log_limit.hpp"
#include <troupe/log.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <string>
#include <vector>

namespace troupe::testing {

/// Sets the time in which the lines of each kind are limited, during its lifetime.
class log_window {
public:
  explicit log_window(std::chrono::nanoseconds x) { detail::set_log_window(x); }
  ~log_window() { detail::set_log_window(detail::log_limit::window); }
  log_window(const log_window&) = delete;
  log_window& operator=(const log_window&) = delete;
};

/// Collects the lines of the log during its lifetime.
class log_lines {
public:
  log_lines() {
    set_log_sink([this](const log_line& x) {
      std::lock_guard lock{mutex_};
      all_.push_back(std::string{x.text} + (x.why != nullptr ? ": " + x.why->detail : ""));
      changed_.notify_all();
    });
  }
  ~log_lines() { set_log_sink({}); }
  log_lines(const log_lines&) = delete;
  log_lines& operator=(const log_lines&) = delete;

  /// For EXPECT_TRUE: a line contains `what`, now or within 30 s.
  ::testing::AssertionResult say(const std::string& what) {
    std::unique_lock lock{mutex_};
    auto there = [&] {
      return std::any_of(all_.begin(), all_.end(),
                         [&](auto& x) { return x.find(what) != std::string::npos; });
    };
    if (changed_.wait_for(lock, std::chrono::seconds{30}, there))
      return ::testing::AssertionSuccess();
    auto result = ::testing::AssertionFailure() << "no line says \"" << what << "\":";
    for (auto& x : all_)
      result << "\n  " << x;
    return result;
  }
  // The functions below first wait until the sink has all lines that were logged.

  std::vector<std::string> all() {
    drain();
    std::lock_guard lock{mutex_};
    return all_;
  }
  std::size_t count() {
    drain();
    std::lock_guard lock{mutex_};
    return all_.size();
  }
  /// Returns the number of lines that contain `what`.
  std::size_t count_of(const std::string& what) {
    drain();
    std::lock_guard lock{mutex_};
    return static_cast<std::size_t>(std::count_if(
        all_.begin(), all_.end(), [&](auto& x) { return x.find(what) != std::string::npos; }));
  }

private:
  static void drain() { EXPECT_TRUE(detail::drain_log(std::chrono::seconds{30})); }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> all_;
};

} // namespace troupe::testing
