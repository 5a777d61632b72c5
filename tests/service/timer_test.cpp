// Waiting for a time.

#include "support/eventually.hpp"
#include "support/random.hpp"
#include "support/world_fixture.hpp"
#include <troupe/timer.hpp>

#include <algorithm>
#include <atomic>
#include <functional>
#include <thread>
#include <utility>

namespace troupe::testing {

namespace {

using clock_type = std::chrono::steady_clock;

/// Runs tasks on the thread that completes a request.
class inline_executor final : public executor {
public:
  void post(std::function<void()> task) override { task(); }
};

TEST(Timer, CompletesWhenTheTimeHasPassed) {
  for (const auto time : {1ms, 5ms, 20ms}) {
    const auto begin = clock_type::now();
    const auto x = after(time);
    EXPECT_FALSE(x.ready() && clock_type::now() < begin + time);
    EXPECT_TRUE(is_ok(answer_of(x)));
    EXPECT_GE(clock_type::now(), begin + time);
  }
}

TEST(Timer, IsDoneAtOnceIfTheTimeIsNotPositive) {
  EXPECT_TRUE(after(0ns).ready());
  EXPECT_TRUE(after(-1h).ready());
  EXPECT_TRUE(is_ok(after(-1h).result()));
}

TEST(Timer, LongestTimeDoesNotOverflow) {
  const auto x = after(std::chrono::nanoseconds::max());
  EXPECT_TRUE(is_ok(answer_of(after(2ms))));
  EXPECT_FALSE(x.ready());
  x.cancel();
}

TEST(Timer, EndInTheOrderOfTheirTimes) {
  std::mt19937_64 random{1};
  std::mutex mutex;
  std::vector<std::size_t> order;
  inline_executor where;
  struct bounds {
    clock_type::time_point earliest, latest;
  };
  std::vector<bounds> ends;
  for (std::size_t i = 0; i < 200; ++i) {
    const std::chrono::microseconds time{pick(random, 0, 50'000)};
    const auto before = clock_type::now();
    const auto x = after(time);
    ends.push_back({before + time, clock_type::now() + time});
    x.then(where, [&, i](const caf::expected<void>&) {
      const std::lock_guard lock{mutex};
      order.push_back(i);
    });
  }
  const auto last_made = clock_type::now();
  EXPECT_TRUE(eventually([&] {
    const std::lock_guard lock{mutex};
    return order.size() == ends.size();
  }));
  // Timers that are over before their continuation is added call it on this thread, so they may
  // come late.
  const std::lock_guard lock{mutex};
  std::erase_if(order, [&](std::size_t i) { return ends[i].earliest <= last_made; });
  for (std::size_t i = 0; i < order.size(); ++i)
    for (std::size_t k = 0; k < i; ++k)
      EXPECT_LE(ends[order[k]].earliest, ends[order[i]].latest) << order[k] << ", " << order[i];
}

TEST(Timer, CancelEndsItAtOnce) {
  const auto x = after(1h);
  x.cancel();
  ASSERT_TRUE(x.ready());
  EXPECT_TRUE(has_code(x.result(), errc::cancelled));
  x.cancel(); // no effect
  EXPECT_TRUE(has_code(x.result(), errc::cancelled));
}

TEST(Timer, CancelOfOneThatIsOverHasNoEffect) {
  const auto x = after(1ms);
  EXPECT_TRUE(is_ok(answer_of(x)));
  x.cancel();
  EXPECT_TRUE(is_ok(x.result()));
}

TEST(Timer, EarlierOnesThatComeLaterAreNotHeldUp) {
  const auto late = after(1h);
  EXPECT_TRUE(is_ok(answer_of(after(5ms))));
  EXPECT_FALSE(late.ready());
  late.cancel();
}

TEST(Timer, AnEmptyHandleLosesOnlyTheResult) {
  std::atomic<int> calls{0};
  inline_executor where;
  after(2ms).then(where, [&](const caf::expected<void>& x) { calls += x ? 1 : 100; });
  EXPECT_TRUE(eventually([&] { return calls == 1; }));
}

TEST(Timer, IsATimeOutForOthers) {
  const auto never = after(1h);
  const auto first = answer_of(when_any(std::vector{never, after(5ms)}));
  ASSERT_TRUE(is_ok(first));
  EXPECT_EQ(*first, 1u);
  never.cancel();
}

TEST(Timer, ATaskWaitsAndCanBeCancelled) {
  const auto begin = clock_type::now();
  auto waits = [](std::chrono::nanoseconds time) -> task<int> {
    co_await value_of(after(time));
    co_return 7;
  };
  const auto short_one = start(waits(3ms));
  const auto long_one = start(waits(1h));
  EXPECT_EQ(must(answer_of(short_one)), 7);
  EXPECT_GE(clock_type::now(), begin + 3ms);
  long_one.cancel();
  EXPECT_TRUE(has_code(answer_of(long_one), errc::cancelled));
}

TEST(Timer, ManyThreadsAddAndCancel) {
  constexpr std::size_t threads = 4;
  constexpr std::size_t each = 2000;
  std::atomic<std::size_t> over{0};
  std::atomic<std::size_t> cancelled{0};
  inline_executor where;
  std::vector<std::thread> all;
  for (std::size_t t = 0; t < threads; ++t)
    all.emplace_back([&, t] {
      std::mt19937_64 random{t + 1};
      std::vector<pending<void>> mine;
      for (std::size_t i = 0; i < each; ++i) {
        mine.push_back(after(std::chrono::microseconds{pick(random, 0, 2000)}));
        mine.back().then(where, [&](const caf::expected<void>& x) {
          cancelled += x ? 0 : 1;
          ++over;
        });
        if (chance(random, 0.5))
          mine[pick(random, 0, i)].cancel();
      }
      for (auto& x : mine) {
        const auto result = answer_of(x);
        EXPECT_TRUE(result || code_of(result.error()) == errc::cancelled);
      }
    });
  for (auto& x : all)
    x.join();
  EXPECT_TRUE(eventually([&] { return over == threads * each; })); // each once
  EXPECT_GT(cancelled.load(), 0u);
  EXPECT_LT(cancelled.load(), threads * each);
}

} // namespace

} // namespace troupe::testing
