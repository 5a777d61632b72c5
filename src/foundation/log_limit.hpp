/// A limit for lines of the log that others can cause.
#pragma once

#include <chrono>
#include <cstddef>
#include <utility>

namespace troupe::detail {

/// Lets some lines pass in each window of time, and counts the others. A window begins with the
/// first line after the last one.
/// @thread one at a time
class log_limit {
public:
  using clock = std::chrono::steady_clock;

  static constexpr std::size_t most_lines = 20; ///< in one window
  static constexpr std::chrono::seconds window{10};

  /// Returns whether a line passes.
  bool admit(clock::time_point now, std::chrono::nanoseconds length = window) noexcept {
    if (now >= end_) {
      end_ = now + length;
      passed_ = 0;
    }
    if (passed_ == most_lines) {
      ++left_out_;
      return false;
    }
    ++passed_;
    return true;
  }

  bool has_left_out() const noexcept { return left_out_ != 0; }
  /// Returns when `take_left_out` is due; `time_point::max()` if no line was left out.
  clock::time_point due() const noexcept {
    return left_out_ == 0 ? clock::time_point::max() : end_;
  }
  /// Returns how many lines were left out since the last call.
  std::size_t take_left_out() noexcept { return std::exchange(left_out_, 0); }

private:
  clock::time_point end_{};
  std::size_t passed_ = 0; ///< in the current window
  std::size_t left_out_ = 0;
};

} // namespace troupe::detail
