/// Time limits that do not count the time in which the process did not run.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>

namespace troupe::detail {

/// Measures time for a thread that looks once per tick. If the thread looks later than that, the
/// process was stopped (also in a debugger) or had no processor: such a gap counts as one tick.
/// Only the last few gaps are deducted, so load cannot stretch a limit forever.
class running_time {
public:
  using clock = std::chrono::steady_clock;

  explicit running_time(std::chrono::nanoseconds tick) noexcept : tick_(tick) {}

  /// Records a look that was due at `expected` and happens at `now`.
  void look(clock::time_point expected, clock::time_point now) noexcept {
    if (now - expected <= tick_)
      return;
    gaps_[next_] = {expected + tick_, now};
    next_ = (next_ + 1) % gaps_.size();
  }

  /// Returns how much time has passed from `begin` to `now`, without the gaps.
  std::chrono::nanoseconds passed(clock::time_point begin, clock::time_point now) const noexcept {
    auto result = now - begin;
    for (auto& x : gaps_)
      result -= std::max(std::min(x.end, now) - std::max(x.begin, begin), clock::duration{0});
    return result;
  }

private:
  struct gap {
    clock::time_point begin;
    clock::time_point end;
  };

  std::chrono::nanoseconds tick_;
  std::array<gap, 3> gaps_{};
  std::size_t next_ = 0;
};

/// A limit for a thread that waits for another thread or process.
class fair_limit {
public:
  using clock = running_time::clock;

  /// `limit` 0: no limit.
  explicit fair_limit(std::chrono::nanoseconds limit) noexcept : limit_(limit) {}

  /// Returns whether the limit is over. Call it at `next` or earlier.
  bool over() noexcept {
    const auto now = clock::now();
    time_.look(next_, now);
    const auto left = limit_ - time_.passed(begin_, now);
    next_ =
        now +
        (limit_.count() == 0 ? tick : std::clamp<std::chrono::nanoseconds>(left, shortest, tick));
    return limit_.count() != 0 && left.count() <= 0;
  }
  clock::time_point next() const noexcept { return next_; }

  /// Waits until `f` holds, with a check as often as necessary. Returns false if the limit is over.
  template <class Condition, class Lock, class F> bool wait(Condition& condition, Lock& lock, F f) {
    while (!condition.wait_until(lock, next(), f))
      if (over())
        return f();
    return true;
  }

private:
  static constexpr std::chrono::milliseconds tick{50};
  static constexpr std::chrono::milliseconds shortest{1};

  const std::chrono::nanoseconds limit_;
  const clock::time_point begin_ = clock::now();
  running_time time_{tick};
  clock::time_point next_ = begin_ + std::clamp<std::chrono::nanoseconds>(limit_, shortest, tick);
};

} // namespace troupe::detail
