/// A limit for what another process does.
#pragma once

#include <algorithm>
#include <chrono>

namespace troupe::detail {

/// Time in which this process stood still itself does not count, as far as nobody could look.
class fair_limit {
public:
  using clock = std::chrono::steady_clock;

  /// 0: none.
  explicit fair_limit(std::chrono::nanoseconds limit) noexcept : limit_(limit) {}

  /// To be asked at `next`, or earlier.
  bool over() noexcept {
    const auto now = clock::now();
    spent_ += std::min<std::chrono::nanoseconds>(now - last_, 2 * step);
    last_ = now;
    return limit_.count() != 0 && spent_ >= limit_;
  }
  clock::time_point next() const noexcept {
    if (limit_.count() == 0)
      return last_ + step;
    return last_ + std::clamp<std::chrono::nanoseconds>(limit_ - spent_, shortest, step);
  }

private:
  static constexpr std::chrono::milliseconds step{50};
  static constexpr std::chrono::milliseconds shortest{1};

  const std::chrono::nanoseconds limit_;
  std::chrono::nanoseconds spent_{0};
  clock::time_point last_ = clock::now();
};

} // namespace troupe::detail
