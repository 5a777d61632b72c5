/// Operations of a client on a result that is still pending.

#include "support/eventually.hpp"
#include "support/manual_executor.hpp"
#include "support/world_fixture.hpp"
#include <troupe/detail/caf_compat.hpp>
#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

/// Work on the compute stream that blocks until let_go() is called.
struct held_launch {
  held_launch(const device& gpu, const any_gpu_ref& writes)
      : answer(hold.hold_stream(gpu, {}, {writes})) {}
  void let_go() { hold.open(); }

  gate hold;
  pending<void> answer;
};

/// Runs one function in CAF's pool.
class once_actor final : public caf::event_based_actor {
public:
  once_actor(caf::actor_config& cfg, std::function<void()> what)
      : caf::event_based_actor(cfg), what_(std::move(what)) {}
  caf::behavior make_behavior() override {
    what_();
    return {};
  }

private:
  std::function<void()> what_;
};

class Pending : public ::testing::Test {
protected:
  test_system sys_{{.devices = 1}};
  device gpu_ = sys_.open();
  gpu_ref<std::uint32_t> ref_ = must(gpu_.allocate<std::uint32_t>(100, true));
};

TEST_F(Pending, WaitUntilTellsWhetherTheAnswerIsThere) {
  held_launch held{gpu_, ref_};
  EXPECT_FALSE(held.answer.ready());
  EXPECT_FALSE(must(held.answer.wait_for(10ms)));
  EXPECT_FALSE(must(held.answer.wait_until(std::chrono::steady_clock::now() - 1s)));
  held.let_go();
  EXPECT_TRUE(must(held.answer.wait_for(patience)));
  EXPECT_TRUE(held.answer.ready());
  EXPECT_TRUE(is_ok(held.answer.result()));
  EXPECT_GT(held.answer.number(), 0u);
}

TEST_F(Pending, HasNoResultBeforeItsAnswer) {
  held_launch held{gpu_, ref_};
  const auto behind = gpu_.fill(ref_, 1);
  EXPECT_TRUE(has_code(held.answer.result(), errc::unavailable));
  EXPECT_TRUE(has_code(behind.result(), errc::unavailable));
  held.let_go();
  EXPECT_TRUE(is_ok(answer_of(behind)));
  EXPECT_TRUE(is_ok(behind.result()));
}

TEST_F(Pending, ManyThreadsWaitForOneAnswer) {
  held_launch held{gpu_, ref_};
  std::atomic<int> answered{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i)
    threads.emplace_back([&, copy = held.answer] {
      if (copy.wait())
        ++answered;
    });
  held.let_go();
  for (auto& t : threads)
    t.join();
  EXPECT_EQ(answered, 8);
}

TEST_F(Pending, ContinuationsRunOnceOnTheirExecutor) {
  manual_executor mine;
  std::vector<int> ran;
  held_launch held{gpu_, ref_};
  held.answer.then(mine, [&](const caf::expected<void>& x) { ran.push_back(x ? 1 : -1); });
  held.let_go();
  must(held.answer.wait());
  EXPECT_TRUE(ran.empty()) << "only the executor may run them";
  mine.run_one();
  held.answer.then(mine, [&](const caf::expected<void>& x) { ran.push_back(x ? 2 : -2); });
  mine.run_one();
  EXPECT_EQ(ran, (std::vector<int>{1, 2}));
  std::promise<std::thread::id> where;
  held.answer.then(
      [&](const caf::expected<void>&) { where.set_value(std::this_thread::get_id()); });
  EXPECT_NE(where.get_future().get(), std::this_thread::get_id());
}

TEST_F(Pending, ContinuationsKeepTheirExecutor) {
  held_launch held{gpu_, ref_};
  auto mine = std::make_shared<manual_executor>();
  const std::weak_ptr<manual_executor> kept = mine;
  bool ran = false;
  held.answer.then(std::move(mine),
                   [&](const caf::expected<void>& x) { ran = static_cast<bool>(x); });
  held.let_go();
  must(held.answer.wait());
  {
    const auto still = kept.lock();
    ASSERT_TRUE(still);
    still->run_one();
  }
  EXPECT_TRUE(ran);
  EXPECT_TRUE(eventually([&] { return kept.expired(); }));
}

TEST_F(Pending, CancelTakesBackWhatIsNotIssued) {
  held_launch held{gpu_, ref_};
  auto other = must(gpu_.allocate<std::uint32_t>(100));
  auto behind = gpu_.copy(other, ref_); // on the same stream: it is issued and waits there
  auto waits = gpu_.upload(ref_, std::vector<std::uint32_t>(100, 7u));
  waits.cancel();
  waits.cancel();
  EXPECT_TRUE(has_code(answer_of(waits), errc::cancelled));
  held.let_go();
  must(held.answer.wait());
  EXPECT_TRUE(is_ok(behind.wait()));
}

TEST_F(Pending, CancelAfterTheAnswerChangesNothing) {
  auto filled = gpu_.fill(ref_, 5u);
  must(filled.wait());
  filled.cancel();
  EXPECT_TRUE(is_ok(filled.wait()));
  EXPECT_EQ(must(gpu_.download(ref_)), std::vector<std::uint32_t>(100, 5u));
}

TEST_F(Pending, DroppedAnswersLeaveTheirOperationsRunning) {
  for (std::uint32_t i = 0; i < 100; ++i)
    gpu_.fill(ref_, i);
  EXPECT_EQ(must(gpu_.download(ref_)), std::vector<std::uint32_t>(100, 99u));
}

TEST_F(Pending, ACallbackMustNotBlock) {
  held_launch held{gpu_, ref_};
  std::promise<caf::error> waited;
  std::promise<caf::error> waited_a_little;
  must(gpu_.stats().wait());
  gpu_.stats().then([&](const caf::expected<device_stats>&) {
    waited.set_value(error_of(held.answer.wait()));
    waited_a_little.set_value(error_of(held.answer.wait_for(1ms)));
  });
  EXPECT_TRUE(has_code(waited.get_future().get(), errc::would_block));
  EXPECT_TRUE(has_code(waited_a_little.get_future().get(), errc::would_block));
  held.let_go();
  EXPECT_TRUE(is_ok(held.answer.wait()));
}

TEST_F(Pending, ALaneMustNotBlock) {
  TROUPE_IN_PROCESS_ONLY("no function of this process runs in a worker");
  held_launch held{gpu_, ref_};
  auto other = must(gpu_.allocate<std::uint32_t>(1));
  std::promise<caf::error> waited;
  auto launched = gpu_.launch(
      [&](launch_context&) {
        waited.set_value(error_of(held.answer.wait()));
        return caf::error{};
      },
      {}, {other});
  EXPECT_TRUE(has_code(waited.get_future().get(), errc::would_block));
  held.let_go();
  EXPECT_TRUE(is_ok(launched.wait()));
}

TEST_F(Pending, APoolActorMustNotBlock) {
  held_launch held{gpu_, ref_};
  std::promise<std::vector<caf::error>> seen;
  auto& sys = sys_.get();
  sys.spawn<once_actor>([&] {
    seen.set_value(std::vector<caf::error>{
        error_of(held.answer.wait()), error_of(world::open(sys, {.devices = {0}})),
        error_of(device::open(sys, 0)), error_of(gpu_.allocate<float>(1, true)),
        error_of(gpu_.allocate_pinned(1)), error_of(gpu_.download(gpu_ref<float>{})),
        error_of(gpu_.claim<float>({})), error_of(gpu_.actor())});
  });
  for (auto& error : seen.get_future().get())
    EXPECT_TRUE(has_code(error, errc::would_block));
  held.let_go();
  EXPECT_TRUE(is_ok(held.answer.wait()));
}

TEST_F(Pending, ARefusedRequestIsAnsweredFromTheStart) {
  auto refused = gpu_.copy(ref_, any_gpu_ref{});
  EXPECT_TRUE(refused.ready());
  EXPECT_TRUE(has_code(refused.wait(), errc::stale_ref));
  std::promise<void> told;
  refused.then([&](const caf::expected<void>& x) {
    if (!x)
      told.set_value();
  });
  EXPECT_EQ(told.get_future().wait_for(patience), std::future_status::ready);
}

} // namespace

} // namespace troupe::testing
