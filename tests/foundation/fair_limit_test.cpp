#include "foundation/fair_limit.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace troupe::testing {
namespace {

using namespace std::chrono_literals;
using detail::fair_limit;
using detail::running_time;

constexpr auto tick = 50ms;

/// Simulates a thread that looks at times set by the test.
class looker {
public:
  /// Looks on time, once per tick.
  void look_after(std::chrono::milliseconds time) {
    for (; time > tick; time -= tick)
      look_late(0ms);
    now_ += time;
    time_.look(now_, now_);
  }
  /// Looks `time` later than the next tick.
  void look_late(std::chrono::milliseconds time) {
    const auto expected = now_ + tick;
    now_ = expected + time;
    time_.look(expected, now_);
  }
  running_time::clock::time_point now() const { return now_; }
  std::chrono::nanoseconds passed(running_time::clock::time_point begin) const {
    return time_.passed(begin, now_);
  }

private:
  running_time time_{tick};
  running_time::clock::time_point now_{1h};
};

TEST(RunningTime, IsTheTimeWhereNobodyStoodStill) {
  looker x;
  const auto begin = x.now();
  x.look_after(1s);
  EXPECT_EQ(x.passed(begin), 1s);
  x.look_late(tick); // one tick late is not a gap
  EXPECT_EQ(x.passed(begin), 1s + 2 * tick);
  EXPECT_EQ(x.passed(x.now()), 0s);
}

TEST(RunningTime, CountsAGapAsATick) {
  looker x;
  const auto begin = x.now();
  x.look_after(1s);
  x.look_late(4s);
  EXPECT_EQ(x.passed(begin), 1s + 2 * tick);
  x.look_after(500ms);
  EXPECT_EQ(x.passed(begin), 1500ms + 2 * tick);
  EXPECT_EQ(x.passed(x.now() - 500ms), 500ms) << "of what began behind the gap";
  EXPECT_EQ(x.passed(x.now() - 2500ms), 500ms) << "of what began in it";
}

TEST(RunningTime, ForgivesAFewGapsOnly) {
  looker x;
  const auto begin = x.now();
  for (int i = 0; i < 3; ++i)
    x.look_late(1s);
  EXPECT_EQ(x.passed(begin), 6 * tick);
  for (int i = 0; i < 20; ++i)
    x.look_late(1s);
  EXPECT_EQ(x.passed(begin), 20 * (1s + tick) + 6 * tick);
}

TEST(FairLimit, EndsInTime) {
  for (const auto limit : {1ms, 20ms, 120ms}) {
    std::mutex mutex;
    std::condition_variable condition;
    std::unique_lock lock{mutex};
    const auto begin = fair_limit::clock::now();
    fair_limit left{limit};
    EXPECT_FALSE(left.wait(condition, lock, [] { return false; }));
    EXPECT_GE(fair_limit::clock::now() - begin, limit);
    EXPECT_TRUE(left.over());
    EXPECT_TRUE(left.wait(condition, lock, [] { return true; }));
  }
}

TEST(FairLimit, OfZeroIsNone) {
  fair_limit none{{}};
  EXPECT_FALSE(none.over());
  EXPECT_GT(none.next(), fair_limit::clock::now());
}

} // namespace
} // namespace troupe::testing
