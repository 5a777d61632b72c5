/// Deadlines, stall limits and calls.
#include "admission/deadline_watch.hpp"
#include "operation/use_of.hpp"
#include "support/core_fixture.hpp"
#include "support/eventually.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include <sys/resource.h>

namespace troupe {

namespace {

using detail::clock;
using detail::deadline_watch;
using testing::allocate_bytes;
using testing::answer_of;
using testing::core_system;
using testing::gate;
using testing::has_code;
using testing::host_work;
using testing::is_ok;
using testing::probe;
using testing::settles;
using namespace std::chrono_literals;

/// Blocks until the deadline watch has reached `when`, or slightly later.
void pass(deadline_watch& keeper, clock::time_point when) {
  std::promise<void> passed;
  keeper.call_at(when, [&] { passed.set_value(); });
  passed.get_future().wait();
}

/// Returns an operation that blocks a stream of the first device, with a stall limit.
std::shared_ptr<probe> standing(const core_system& system, gate& held,
                                std::chrono::nanoseconds stall_limit) {
  auto op = std::make_shared<probe>(
      std::vector{system.lane()},
      [&](detail::part& p, detail::lane& on) -> caf::expected<detail::issue_outcome> {
        auto error = on.device().launch_host(
            on.stream(p.stream), [](void* x) { static_cast<gate*>(x)->passer()(); }, &held);
        if (error)
          return error;
        return detail::issue_outcome::enqueued;
      });
  op->stall_limit = stall_limit.count();
  return op;
}

// INV-1. The lateness of a result also depends on the machine. A benchmark measures it.
TEST(DeadlineWatch, KeepsDeadlines) {
  core_system system;
  gate held;
  auto front = system.device().launch(held.in_stream(), {}, {}, {});
  held.wait_reached();
  constexpr int count = 30;
  std::mt19937 random{3};
  std::vector<clock::time_point> wanted;
  std::vector<std::shared_ptr<probe>> ops;
  std::vector<clock::time_point> answered(count);
  std::vector<std::promise<void>> told(count);
  const auto begin = clock::now() + 50ms;
  for (std::size_t i = 0; i < count; ++i) {
    wanted.push_back(begin + std::chrono::microseconds{random() % 200'000});
    ops.push_back(std::make_shared<probe>(std::vector{system.lane()}));
    ops.back()->deadline = wanted.back();
    ops.back()->on_answer([&, i] {
      answered[i] = clock::now();
      told[i].set_value();
    });
    system.runtime()->start(ops.back());
  }
  for (std::size_t i = 0; i < count; ++i) {
    told[i].get_future().wait();
    EXPECT_TRUE(has_code(ops[i]->error(), errc::deadline_exceeded));
    EXPECT_GE(answered[i], wanted[i]);
    EXPECT_LT(answered[i] - wanted[i], 10s);
  }
  held.open();
}

TEST(DeadlineWatch, CountsAStallFromTheFirstStart) {
  core_system system;
  gate front;
  gate own;
  auto before = system.device().launch(front.in_stream(), {}, {}, {});
  front.wait_reached();
  auto op = standing(system, own, 40ms);
  system.runtime()->start(op);
  pass(system.deadlines(), clock::now() + 150ms); // it waits and has not started
  EXPECT_EQ(op->stalls(), 0);
  EXPECT_EQ(op->first_started_at(), 0);
  const auto opened = clock::now();
  front.open();
  own.wait_reached();
  while (op->stalls() == 0)
    ASSERT_LT(clock::now(), opened + testing::patience);
  EXPECT_GE(clock::now() - opened, 40ms);
  pass(system.deadlines(), clock::now() + 100ms);
  EXPECT_EQ(op->stalls(), 1);
  EXPECT_FALSE(op->completed()); // the deadline watch only reports a stall
  own.open();
  EXPECT_TRUE(is_ok(answer_of(op)));
}

TEST(DeadlineWatch, DoesNotCountTheTimeBehindAnotherStream) {
  core_system system;
  auto memory = allocate_bytes(system.device(), 64);
  gate front;
  auto before = system.device().launch(front.in_stream(), {}, {memory}, {});
  front.wait_reached();
  auto op = std::make_shared<probe>(std::vector{system.lane()});
  op->parts()[0].stream = detail::stream_kind::collective;
  op->add_use(detail::use_of(memory, true, true));
  op->stall_limit = std::chrono::nanoseconds{20ms}.count();
  system.runtime()->start(op);
  ASSERT_TRUE(testing::eventually([&] { return op->issued() == 1; }));
  pass(system.deadlines(), clock::now() + 100ms);
  EXPECT_EQ(op->stalls(), 0);
  front.open();
  EXPECT_TRUE(is_ok(answer_of(op)));
}

TEST(DeadlineWatch, SeesAStallAfterADeadline) {
  core_system system;
  gate held;
  auto op = standing(system, held, 1s);
  op->deadline = clock::now() + 500ms; // it must have started before
  system.runtime()->start(op);
  EXPECT_TRUE(has_code(answer_of(op), errc::deadline_exceeded));
  const auto until = clock::now() + 5s;
  while (op->stalls() == 0 && clock::now() < until)
    std::this_thread::yield();
  EXPECT_EQ(op->stalls(), 1);
  held.open();
  EXPECT_TRUE(settles(*op));
}

TEST(DeadlineWatch, KnowsLimitsThatNeverCome) {
  core_system system;
  gate held;
  auto op = standing(system, held, std::chrono::nanoseconds::max());
  op->deadline = clock::time_point::max();
  system.runtime()->start(op);
  held.wait_reached();
  pass(system.deadlines(), clock::now() + 10ms);
  EXPECT_EQ(op->stalls(), 0);
  EXPECT_FALSE(op->completed());
  held.open();
  EXPECT_TRUE(is_ok(answer_of(op)));
}

TEST(DeadlineWatch, CallsInTime) {
  deadline_watch keeper;
  std::mutex mutex;
  std::vector<int> called;
  std::promise<void> last;
  const auto begin = clock::now();
  const auto note = [&](int i) {
    return [&, i] {
      EXPECT_GE(clock::now(), begin + i * 10ms);
      std::lock_guard lock{mutex};
      called.push_back(i);
    };
  };
  keeper.call_at(begin + 30ms, note(3));
  keeper.call_at(begin + 10ms, note(1));
  const auto cancelled = keeper.call_at(begin + 20ms, note(2));
  keeper.call_at(begin, [&] { keeper.call_at(begin + 40ms, [&] { last.set_value(); }); });
  keeper.cancel_call(cancelled);
  last.get_future().wait();
  std::lock_guard lock{mutex};
  EXPECT_EQ(called, (std::vector<int>{1, 3}));
}

/// Returns how often the deadline watch's thread has slept until `when`.
std::future<long> sleeps_until(deadline_watch& keeper, clock::time_point when) {
  auto told = std::make_shared<std::promise<long>>();
  keeper.call_at(when, [told] {
    rusage used{};
    EXPECT_EQ(::getrusage(RUSAGE_THREAD, &used), 0);
    told->set_value(used.ru_nvcsw);
  });
  return told->get_future();
}

TEST(DeadlineWatch, RestsWhileNothingIsWatched) {
  deadline_watch keeper;
  const auto begin = clock::now();
  auto first = sleeps_until(keeper, begin + 200ms);
  auto last = sleeps_until(keeper, begin + 1200ms);
  EXPECT_LT(last.get() - first.get(), 10) << "a tick every 50 ms would make 20";
}

TEST(DeadlineWatch, WatchesAnOperationThatComesWhileItRests) {
  core_system system;
  const auto far = system.deadlines().call_at(clock::now() + 2 * testing::patience, [] {});
  for (int i = 0; i < 3; ++i) {
    pass(system.deadlines(), clock::now() + 150ms); // three ticks
    gate held;
    auto op = standing(system, held, 40ms);
    op->deadline = clock::now() + 20ms;
    system.runtime()->start(op);
    EXPECT_TRUE(has_code(answer_of(op), errc::deadline_exceeded));
    // A lane that is so slow that it comes after the deadline drops the operation.
    EXPECT_TRUE(testing::eventually([&] { return op->stalls() == 1 || op->settled(); }));
    held.open();
    EXPECT_TRUE(settles(*op));
  }
  system.deadlines().cancel_call(far);
}

TEST(DeadlineWatch, TakesOutTwiceWhatIsThereOnce) {
  core_system system;
  deadline_watch keeper;
  std::vector<std::shared_ptr<probe>> ops;
  for (int i = 0; i < 4; ++i) {
    ops.push_back(std::make_shared<probe>(std::vector{system.lane()}));
    keeper.add(*ops.back());
  }
  keeper.remove(*ops[1]);
  keeper.remove(*ops[1]);
  keeper.remove(*ops[0]);
  keeper.remove(*ops[1]);
  EXPECT_EQ(keeper.size(), 2u);
  std::set<const detail::operation*> seen;
  keeper.for_each([&](detail::operation& x) { seen.insert(&x); });
  EXPECT_EQ(seen, (std::set<const detail::operation*>{ops[2].get(), ops[3].get()}));
  keeper.remove(*ops[3]);
  keeper.remove(*ops[2]);
  EXPECT_EQ(keeper.size(), 0u);
}

TEST(DeadlineWatch, IsReadWhileItChanges) {
  core_system system;
  deadline_watch keeper;
  std::atomic<bool> stop{false};
  std::thread reader{[&] {
    while (!stop)
      keeper.for_each([](detail::operation& x) { EXPECT_STREQ(x.verb(), "probe"); });
  }};
  std::vector<std::thread> writers;
  for (unsigned seed = 0; seed < 3; ++seed)
    writers.emplace_back([&, seed] {
      std::mt19937 random{seed};
      for (int i = 0; i < 3'000; ++i) {
        auto op = std::make_shared<probe>(std::vector{system.lane()});
        op->deadline = clock::now() + std::chrono::microseconds{random() % 500};
        keeper.add(*op);
        if (random() % 2 == 0) {
          EXPECT_TRUE(has_code(answer_of(op), errc::deadline_exceeded));
        }
        keeper.remove(*op);
      }
    });
  for (auto& x : writers)
    x.join();
  stop = true;
  reader.join();
  EXPECT_EQ(keeper.size(), 0u);
}

} // namespace

} // namespace troupe
