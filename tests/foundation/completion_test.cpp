/// The client's side of an operation: wait, listeners, continuations.
#include "support/core_fixture.hpp"
#include <troupe/pending.hpp>

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <barrier>
#include <future>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace troupe {

namespace {

using detail::clock;
using detail::completion;
using testing::answer_of;
using testing::has_code;
using testing::is_ok;
using namespace std::chrono_literals;

caf::error error_number(int i) { return make_error(errc::internal, std::to_string(i)); }

/// Collects tasks, which the test runs.
class queue final : public executor {
public:
  void post(std::function<void()> task) override { tasks.push_back(std::move(task)); }
  std::vector<std::function<void()>> tasks;
};

struct counting_completion : completion {
  void cancel() noexcept override { answer(make_error(errc::cancelled, "")); }
  void before_answer(const caf::error&) noexcept override {
    EXPECT_FALSE(completed());
    before.fetch_add(1);
  }
  std::atomic<int> before{0};
};

TEST(Completion, IsAnsweredOnce) {
  completion x;
  EXPECT_FALSE(x.completed());
  EXPECT_TRUE(x.answer(error_number(1)));
  EXPECT_FALSE(x.answer({}));
  EXPECT_FALSE(x.answer(error_number(2)));
  EXPECT_EQ(failure_of(x.error())->detail, "1");
}

// INV-1
TEST(Completion, HasOneWinnerAmongMany) {
  constexpr int rounds = 3'000;
  constexpr int threads = 4;
  std::vector<counting_completion> all(rounds);
  std::vector<std::atomic<int>> winners(rounds);
  std::vector<std::atomic<int>> winner(rounds);
  std::vector<std::atomic<int>> heard(rounds);
  std::barrier sync{threads};
  std::vector<std::thread> pool;
  for (int t = 0; t < threads; ++t)
    pool.emplace_back([&, t] {
      for (std::size_t i = 0; i < rounds; ++i) {
        sync.arrive_and_wait();
        if (t % 2 == 0)
          all[i].on_answer([&, i] { heard[i].fetch_add(1); });
        if (all[i].answer(error_number(t))) {
          winners[i].fetch_add(1);
          winner[i] = t;
        }
        if (t % 2 != 0)
          all[i].on_answer([&, i] { heard[i].fetch_add(1); });
        all[i].wait();
      }
    });
  for (auto& x : pool)
    x.join();
  for (std::size_t i = 0; i < rounds; ++i) {
    ASSERT_EQ(winners[i], 1);
    ASSERT_EQ(heard[i], threads);
    ASSERT_EQ(all[i].before, 1);
    ASSERT_EQ(failure_of(all[i].error())->detail, std::to_string(winner[i]));
  }
}

TEST(Completion, WakesThoseWhoWait) {
  for (int round = 0; round < 500; ++round) {
    completion x;
    std::vector<std::thread> waiting;
    std::atomic<int> woken{0};
    for (int i = 0; i < 3; ++i)
      waiting.emplace_back([&, i] {
        if (i == 0)
          x.wait();
        else
          EXPECT_TRUE(
              x.wait_until(i == 1 ? clock::now() + testing::patience : clock::time_point::max()));
        EXPECT_TRUE(has_code(x.error(), errc::internal));
        woken.fetch_add(1);
      });
    x.answer(error_number(round));
    for (auto& t : waiting)
      t.join();
    EXPECT_EQ(woken, 3);
  }
}

TEST(Completion, WaitsNoLongerThanAsked) {
  completion x;
  const auto begin = clock::now();
  EXPECT_FALSE(x.wait_until(begin - 1h));
  EXPECT_FALSE(x.wait_until(begin + 20ms));
  EXPECT_GE(clock::now(), begin + 20ms);
  x.answer({});
  EXPECT_TRUE(x.wait_until(begin - 1h));
}

TEST(Completion, TellsListenersWheneverTheyCome) {
  completion x;
  int told = 0;
  x.on_answer([&] { told += 1; });
  x.on_answer([&] { told += 10; });
  EXPECT_EQ(told, 0);
  x.answer({});
  EXPECT_EQ(told, 11);
  x.on_answer([&] { told += 100; });
  EXPECT_EQ(told, 111);
}

TEST(Completion, LetsGoOfListenersWhenItIsAnswered) {
  completion x;
  auto held = std::make_shared<int>(0);
  x.on_answer([held] {});
  EXPECT_EQ(held.use_count(), 2);
  x.answer({});
  EXPECT_EQ(held.use_count(), 1);
}

TEST(Pending, GivesItsValueOrWhyThereIsNone) {
  const auto value = std::make_shared<int>(41);
  const auto state = std::make_shared<completion>();
  const pending<int> x{state, value};
  EXPECT_FALSE(x.ready());
  *value = 42;
  state->answer({});
  EXPECT_TRUE(x.ready());
  EXPECT_EQ(testing::must(x.wait()), 42);
  EXPECT_EQ(testing::must(x.result()), 42);
  const pending<int> refused{make_error(errc::overloaded, "")};
  EXPECT_TRUE(refused.ready());
  EXPECT_EQ(refused.number(), 0u);
  EXPECT_TRUE(has_code(refused.wait(), errc::overloaded));
}

TEST(Pending, CancelsThroughItsCompletion) {
  const auto state = std::make_shared<counting_completion>();
  const pending<void> x{state, nullptr};
  x.cancel();
  EXPECT_TRUE(has_code(x.wait().error(), errc::cancelled));
  EXPECT_EQ(state->before, 1);
}

TEST(Pending, GoesOnWhereItIsTold) {
  queue here;
  const auto state = std::make_shared<completion>();
  const auto value = std::make_shared<int>(7);
  std::vector<int> seen;
  pending<int>{state, value}.then(
      here, [&](const caf::expected<int>& x) { seen.push_back(testing::must(x)); });
  EXPECT_TRUE(here.tasks.empty());
  state->answer({});
  ASSERT_EQ(here.tasks.size(), 1u);
  EXPECT_TRUE(seen.empty());
  here.tasks.front()();
  EXPECT_EQ(seen, std::vector<int>{7});
  pending<int>{state, value}.then(here, [&](const caf::expected<int>&) {});
  EXPECT_EQ(here.tasks.size(), 2u); // answered already
}

TEST(Pending, GoesOnInOrderOnTheCallbackThread) {
  constexpr int count = 200;
  std::vector<int> seen;
  std::set<std::thread::id> threads;
  std::promise<void> last;
  const auto state = std::make_shared<completion>();
  for (int i = 0; i < count; ++i)
    pending<void>{state, nullptr}.then([&, i](const caf::expected<void>& x) {
      EXPECT_TRUE(x);
      seen.push_back(i);
      threads.insert(std::this_thread::get_id());
      if (i % 50 == 0)
        throw std::runtime_error("a callback throws");
      if (i == count - 1)
        last.set_value();
    });
  state->answer({});
  last.get_future().wait();
  ASSERT_EQ(seen.size(), std::size_t{count});
  for (int i = 0; i < count; ++i)
    EXPECT_EQ(seen[static_cast<std::size_t>(i)], i);
  EXPECT_EQ(threads.size(), 1u);
  EXPECT_FALSE(threads.contains(std::this_thread::get_id()));
}

// INV-5
TEST(Pending, RefusesToBlockWhereThatWouldStopOthers) {
  testing::core_system system;
  const auto never = std::make_shared<completion>();
  const auto over = std::make_shared<completion>();
  over->answer({});
  const auto check = [&] {
    EXPECT_TRUE(has_code(pending<void>(never, nullptr).wait().error(), errc::would_block));
    EXPECT_TRUE(has_code(pending<void>(never, nullptr).wait_for(1h).error(), errc::would_block));
    EXPECT_TRUE(pending<void>(over, nullptr).wait());
  };
  std::promise<void> called;
  pending<void>{over, nullptr}.then([&](const caf::expected<void>&) {
    check();
    called.set_value();
  });
  called.get_future().wait();
  EXPECT_TRUE(is_ok(answer_of(system.device().launch(
      [&](launch_context&) {
        check();
        return caf::error{};
      },
      {}, {}, {}))));
  std::promise<void> kept;
  system.deadlines().call_at(clock::now(), [&] {
    check();
    kept.set_value();
  });
  kept.get_future().wait();
  EXPECT_TRUE(is_ok(detail::check_may_block())); // this thread may block
}

} // namespace

} // namespace troupe
