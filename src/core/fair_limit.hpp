/// Limits that are fair to a process that did not run all the time.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>

namespace troupe::detail {

/// The time that a thread sees pass which looks once in a tick. Where it comes later than that, the
/// process stood still (it was stopped, or in a debugger), or had no processor: such a gap counts
/// as one tick. Since any time only the last few do: load cannot stretch a limit for ever.
class running_time {
public:
  using clock = std::chrono::steady_clock;

  explicit running_time(std::chrono::nanoseconds tick) noexcept : tick_(tick) {}

  /// The thread was to look at `expected`, and does it at `now`.
  void look(clock::time_point expected, clock::time_point now) noexcept {
    if (now - expected <= tick_)
      return;
    gaps_[next_] = {expected + tick_, now};
    next_ = (next_ + 1) % gaps_.size();
  }

  /// How much has passed from `begin` to `now`.
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

/// For a thread that waits for what another one, or another process, does.
class fair_limit {
public:
  using clock = running_time::clock;

  /// 0: none.
  explicit fair_limit(std::chrono::nanoseconds limit) noexcept : limit_(limit) {}

  /// To be asked at `next`, or earlier.
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

  /// Waits until `f` holds, looking as often as it must. False: the limit is over.
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
