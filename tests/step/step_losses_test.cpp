/// Steps of a world that loses a device.
#include "support/worker_losses.hpp"
#include <troupe/launch.hpp>
#include <troupe/step.hpp>

#include <gtest/gtest.h>

#include <csignal>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace troupe::testing {

namespace {

using element = std::uint32_t;
using row = std::vector<element>;

constexpr std::size_t count = 100;

/// A launch without work. Its check calls `on_check`, while the operations of a run are made.
constexpr const char* checked_launch = "StepLosses.checked";
std::function<void()> on_check;

/// Workers run the same program, so the launch is registered there too.
[[maybe_unused]] const bool registered = [] {
  must(register_launch(checked_launch, {.enqueue = [](auto&&...) { return caf::error{}; },
                                        .check =
                                            [](auto&&...) {
                                              if (on_check)
                                                on_check();
                                              return caf::error{};
                                            }}));
  return true;
}();

class StepLosses : public ::testing::Test {
protected:
  void TearDown() override { doors_->devices.open(); }

  void start(int devices, standby_policy standby, loss_policy on_loss) {
    auto options = in_worker_processes(devices, doors_);
    options.lanes.open_backoff = 10ms;
    system_.emplace(std::move(options));
    world_config config;
    config.limits.standby = standby;
    config.limits.on_loss = on_loss;
    config.limits.restarts = 1000;
    config.limits.restart_backoff = 1ms;
    world_.emplace(system_->open_world(config));
    feed_.emplace(*system_, world_->actor());
  }

  world_status until_prepared() {
    return feed_->until(
        [](const world_status& x) { return x.phase == world_phase::ready && x.standby_ready; });
  }

  void until_members(std::size_t number) {
    feed_->until([=](const world_status& x) {
      return x.phase == world_phase::ready && x.members.size() == number;
    });
  }

  /// Fills x on each of three ranks with its number, from 1.
  static recording filled_by_rank() {
    recording r;
    for (int rank = 0; rank < 3; ++rank)
      r.on(rank).fill("x", static_cast<element>(rank + 1));
    return r;
  }

  /// Runs y = the sum of all ranks' x in a world without rank 1, which returns before the operation
  /// of `sum` is made. The former y of rank 1 must not be in a sum.
  void returns_during_a_run(void (*sum)(recording&)) {
    start(3, standby_policy::communicators, loss_policy::shrink);
    const auto& w = *world_;
    auto x = must(w.allocate<element>(count)), y = must(w.allocate<element>(count));
    auto r = filled_by_rank();
    r.copy("y", "x").on(0).launch(checked_launch, {}, {}, {});
    sum(r);
    const auto step = must(w.record(r, {{"x", x}, {"y", y}}));
    until_prepared();
    EXPECT_TRUE(is_ok(answer_of(step.run())));
    doors_->devices.close();
    EXPECT_EQ(code_of(kill_worker(w.device_of(1))), errc::worker_lost);
    until_members(2);
    on_check = [this] {
      doors_->devices.open();
      until_members(3);
    };
    const auto why = error_of(answer_of(step.run({.allow_shrunk = true})));
    on_check = {};
    EXPECT_TRUE(has_code(why, errc::membership_changed));
    EXPECT_TRUE(is_ok(answer_of(step.run())));
    for (auto& got : must(w.download(y)))
      EXPECT_EQ(got, row(count, 6));
  }

  std::shared_ptr<doors> doors_ = std::make_shared<doors>();
  std::optional<test_system> system_;
  std::optional<world> world_;
  std::optional<world_feed> feed_;
};

/// The memory of the lost device is kept: handles of the step stay valid.
TEST_F(StepLosses, IsAnsweredAndRunsAgainAfterTheFailover) {
  TROUPE_NEEDS_DEVICES(2);
  start(2, standby_policy::full, loss_policy::failover);
  const auto& w = *world_;
  auto x = must(w.allocate<element>(count)), y = must(w.allocate<element>(count));
  gate held{true};
  recording r;
  must(answer_of(w.fill(x, 2)));
  r.on(0).fill("x", element{2});
  r.on(1).launch(gate::launch_name, held.arguments(), {"x"}, {"y"});
  r.copy("y", "x").all_reduce("y");
  const auto step = must(w.record(r, {{"x", x}, {"y", y}}));
  for (int round = 0; round < 2; ++round) {
    const auto before = until_prepared();
    const auto pid = must(answer_of(w.device_of(1).stats())).worker_pid;
    auto running = step.run();
    if (round == 0) {
      ASSERT_TRUE(held.wait_reached());
    }
    ASSERT_EQ(::kill(static_cast<pid_t>(pid), SIGKILL), 0);
    const auto why = error_of(answer_of(running));
    if (round == 0) {
      EXPECT_TRUE(has_code(why, errc::worker_lost));
      EXPECT_NE(describe(why).find("request 2 of the step (launch)"), std::string::npos)
          << describe(why);
    } else {
      EXPECT_TRUE(!why || has_code(why, errc::worker_lost));
    }
    held.open();
    feed_->until(world_phase::ready, before.epoch + 1);
    EXPECT_FALSE(x[1].stale());
    EXPECT_TRUE(is_ok(answer_of(step.run())));
    for (auto& got : must(w.download(y)))
      EXPECT_EQ(got, row(count, 4));
  }
}

TEST_F(StepLosses, RunsOnTheSurvivorsIfItMay) {
  TROUPE_NEEDS_DEVICES(3);
  start(3, standby_policy::communicators, loss_policy::shrink);
  const auto& w = *world_;
  auto x = must(w.allocate<element>(count)), y = must(w.allocate<element>(count));
  auto r = filled_by_rank();
  r.copy("y", "x").all_reduce("y");
  const auto step = must(w.record(r, {{"x", x}, {"y", y}}));
  until_prepared();
  doors_->devices.close();
  EXPECT_EQ(code_of(kill_worker(w.device_of(1))), errc::worker_lost);
  until_members(2);
  EXPECT_TRUE(has_code(answer_of(step.run()), errc::membership_changed));
  const auto done = must(answer_of(step.run({.allow_shrunk = true})));
  EXPECT_EQ(done.ranks, (std::vector<std::int32_t>{0, 2}));
  row got(count);
  for (std::size_t rank : {0, 2}) {
    EXPECT_TRUE(is_ok(answer_of(w.device_of(rank).download(y[rank], got))));
    EXPECT_EQ(got, row(count, 4));
  }
  auto some = must(w.allocate<element>(count, false, {.allow_shrunk = true}));
  EXPECT_FALSE(some[1]);
  const auto of_some =
      must(w.record(recording{}.fill("some", element{5}).all_reduce("some"), {{"some", some}}));
  EXPECT_TRUE(is_ok(answer_of(of_some.run({.allow_shrunk = true}))));
  EXPECT_TRUE(is_ok(answer_of(w.device_of(2).download(some[2], got))));
  EXPECT_EQ(got, row(count, 10));
  EXPECT_TRUE(has_code(w.record(recording{}.broadcast("x", 1), {{"x", x}}), errc::unavailable));
  EXPECT_TRUE(is_ok(w.record(recording{}.broadcast("x", 2), {{"x", x}})));
  doors_->devices.open();
  feed_->until(
      [](const world_status& s) { return s.phase == world_phase::ready && s.members.size() == 3; });
  EXPECT_TRUE(is_ok(answer_of(step.run())));
  for (auto& all : must(w.download(y)))
    EXPECT_EQ(all, row(count, 6));
}

TEST_F(StepLosses, FailsIfARankReturnsBeforeItsCollectiveIsMade) {
  TROUPE_NEEDS_DEVICES(3);
  returns_during_a_run([](recording& r) { r.all_reduce("y"); });
}

TEST_F(StepLosses, FailsIfARankReturnsBeforeItsGroupIsMade) {
  TROUPE_NEEDS_DEVICES(3);
  returns_during_a_run([](recording& r) { r.group(recording{}.all_reduce("y")); });
}

} // namespace

} // namespace troupe::testing
