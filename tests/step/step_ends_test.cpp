/// How runs of recorded steps end, and the queues that they wait in.
#include "step/step_fixture.hpp"

#include <memory>
#include <thread>

namespace troupe::testing {

namespace {

TEST_F(Step, FailsWithItsFirstFailureAndTheOthersRun) {
  auto x = filled(1), y = filled(1), z = filled(1);
  recording r;
  r.fill("z", element{2});
  r.on(0).launch("troupe.testing.failure", {'a'}, {}, {"x"});
  r.all_reduce("x").all_reduce("z");
  r.on(0).launch("troupe.testing.failure", {'b'}, {}, {"y"});
  const auto step = must(w_.record(r, {{"x", x}, {"y", y}, {"z", z}}));
  const auto why = error_of(answer_of(step.run()));
  EXPECT_TRUE(has_code(why, errc::launch_failed));
  EXPECT_EQ(failure_of(why)->verb, "launch");
  EXPECT_EQ(failure_of(why)->detail.find("request 2 of the step (launch): "), 0u) << text_of(why);
  EXPECT_EQ(content(z), same(2 * static_cast<element>(w_.size())));
  EXPECT_TRUE(has_code(w_.download(x), errc::indeterminate)) << "it was not reduced";
}

TEST_F(Step, IsAnsweredWhenAllOfItIsOver) {
  gate held;
  auto x = filled(1), y = filled(1);
  recording r;
  r.on(0).launch("troupe.testing.failure", {'a'}, {}, {"x"});
  r.on(1).launch(gate::launch_name, held.arguments(), {}, {"y"});
  r.fill("y", element{3});
  const auto step = must(w_.record(r, {{"x", x}, {"y", y}}));
  auto done = step.run();
  ASSERT_TRUE(held.wait_reached());
  // By then rank 0 has its share of the step behind it.
  row got(count);
  EXPECT_TRUE(is_ok(answer_of(w_.device_of(0).download(y[0], got))));
  EXPECT_FALSE(done.ready());
  held.open();
  EXPECT_TRUE(has_code(answer_of(done), errc::launch_failed));
  EXPECT_EQ(content(y), same(3));
}

TEST_F(Step, HasOneDeadline) {
  gate held;
  auto x = filled(1), y = filled(1);
  recording r;
  r.fill("y", element{2});
  r.on(1).launch(gate::launch_name, held.arguments(), {}, {"x"});
  r.all_reduce("x").fill("y", element{3});
  const auto step = must(w_.record(r, {{"x", x}, {"y", y}}));
  const auto why = error_of(answer_of(step.run({.deadline = 50ms}), at_once));
  EXPECT_TRUE(has_code(why, errc::deadline_exceeded));
  EXPECT_NE(text_of(why).find("request 2 of the step (launch)"), std::string::npos) << text_of(why);
  held.open();
  EXPECT_EQ(content(y), same(3)) << "what has begun runs on";
}

class StepRepeated : public Step {
protected:
  /// Runs the step behind a launch that holds the lanes, so that it does not run before its
  /// deadline. Returns the number of the run.
  std::uint64_t run_late() {
    for (auto& on : devices_of(w_))
      before_.push_back(lanes_.hold_lane(on));
    EXPECT_TRUE(lanes_.wait_reached());
    const auto late = step_.run({.deadline = 50ms});
    const auto why = error_of(answer_of(late, at_once));
    EXPECT_TRUE(has_code(why, errc::deadline_exceeded));
    EXPECT_NE(text_of(why).find("request 1 of the step (copy)"), std::string::npos) << text_of(why);
    return late.number();
  }
  void open_lanes() {
    lanes_.open();
    for (auto& one : before_)
      EXPECT_TRUE(is_ok(answer_of(one)));
  }
  void expect_run_once() {
    EXPECT_EQ(content(y_), same(1));
    EXPECT_EQ(content(x_), same(3));
  }

  refs x_ = filled(1), y_ = filled(2), z_ = filled(3);
  step step_ =
      must(w_.record(recording{}.copy("y", "x").copy("x", "z"), {{"x", x_}, {"y", y_}, {"z", z_}}));
  gate lanes_;
  std::vector<pending<void>> before_;
};

TEST_F(StepRepeated, RunsByItsNumber) {
  const auto number = run_late();
  open_lanes();
  EXPECT_TRUE(has_code(w_.download(x_), errc::skipped)) << "it did not run";
  EXPECT_TRUE(is_ok(answer_of(step_.run({.retry_of = number}))));
  expect_run_once();
}

/// The lanes still have the requests that did not run.
TEST_F(StepRepeated, IsAdmittedBeforeTheLanesGoOn) {
  const auto number = run_late();
  const auto again = step_.run({.retry_of = number});
  open_lanes();
  EXPECT_TRUE(is_ok(answer_of(again)));
  expect_run_once();
}

TEST_F(Step, ThatIsCancelledRunsNoRequestThatHasNotBegun) {
  gate held;
  auto x = filled(1), y = filled(1), z = filled(1);
  recording r;
  r.on(0).launch(gate::launch_name, held.arguments(), {}, {"x"});
  r.copy("y", "x").copy("z", "y");
  const auto step = must(w_.record(r, {{"x", x}, {"y", y}, {"z", z}}));
  gate lanes;
  std::vector<pending<void>> before;
  for (auto& on : devices_of(w_))
    before.push_back(lanes.hold_lane(on));
  ASSERT_TRUE(lanes.wait_reached());
  auto done = step.run();
  done.cancel();
  const auto why = error_of(answer_of(done, at_once));
  EXPECT_TRUE(has_code(why, errc::cancelled));
  lanes.open();
  for (auto& one : before)
    EXPECT_TRUE(is_ok(answer_of(one)));
  EXPECT_EQ(content(z), same(1)) << "it is as if the step had never been made";
  held.open();
}

TEST_F(Step, RunsWholeOrNotAtAll) {
  auto x = filled(1), y = filled(1), z = filled(1);
  recording r;
  r.fill("x", element{5}).copy("y", "z");
  const auto step = must(w_.record(r, {{"x", x}, {"y", y}, {"z", z}}));
  gate held;
  auto before = held.hold_lane(w_.device_of(0));
  ASSERT_TRUE(held.wait_reached());
  auto late = w_.device_of(0).fill(z[0], 7u, {.deadline = 20ms});
  EXPECT_TRUE(has_code(answer_of(late), errc::deadline_exceeded));
  held.open();
  EXPECT_TRUE(is_ok(answer_of(before)));
  const auto refused = step.run();
  EXPECT_TRUE(has_code(answer_of(refused), errc::skipped));
  EXPECT_NE(text_of(refused.error()).find("request 2 of the step (copy)"), std::string::npos)
      << text_of(refused.error());
  EXPECT_TRUE(has_code(w_.download(x), errc::skipped)) << "the step was to write it";
  for (std::size_t rank = 0; rank < w_.size(); ++rank)
    accept_bytes(w_.device_of(rank), x[rank]);
  EXPECT_EQ(content(x), same(1)) << "nothing of the step ran";
}

TEST_F(Step, ReadsWhatItOverwritesBefore) {
  auto x = filled(1), y = filled(1);
  recording r;
  r.fill({"x", 0, 4}, element{5}).fill({"x", 4}, element{6}).copy("y", "x").all_reduce("x");
  const auto step = must(w_.record(r, {{"x", x}, {"y", y}}));
  gate held;
  auto before = held.hold_lane(w_.device_of(0));
  ASSERT_TRUE(held.wait_reached());
  EXPECT_TRUE(has_code(answer_of(w_.device_of(0).fill(x[0], 7u, {.deadline = 20ms})),
                       errc::deadline_exceeded));
  held.open();
  EXPECT_TRUE(is_ok(answer_of(before)));
  EXPECT_TRUE(is_ok(answer_of(step.run())));
  auto want = same(6);
  for (auto& one : want)
    std::fill_n(one.begin(), 4, element{5});
  EXPECT_EQ(content(y), want);
}

class StepWithShortQueues : public Step {
protected:
  StepWithShortQueues() : StepWithShortQueues(std::make_shared<fault_plan>()) {}
  explicit StepWithShortQueues(std::shared_ptr<fault_plan> plan)
      : Step({.devices = 2, .faults = plan, .lanes = {.queue_limit = 4}}, short_queue()),
        plan_(std::move(plan)) {}
  /// It has no standby, so that a reset leaves it without a communicator.
  static world_config short_queue() {
    world_config result;
    result.limits.waiting_limit = 2;
    result.collectives = collectives_policy::nccl;
    return result;
  }

  const std::shared_ptr<fault_plan> plan_;
};

/// Its requests count as one.
TEST_F(StepWithShortQueues, MayBeLongerThanAQueue) {
  auto x = filled(1);
  recording r;
  for (element i = 0; i < 100; ++i)
    r.fill("x", i);
  const auto step = must(w_.record(r, {{"x", x}}));
  std::vector<pending<step_done>> done;
  for (int i = 0; i < 10; ++i)
    done.push_back(step.run());
  for (auto& one : done)
    EXPECT_TRUE(is_ok(answer_of(one)));
  EXPECT_EQ(content(x), same(99));
}

TEST_F(StepWithShortQueues, IsRefusedIfThereIsNoRoom) {
  auto x = filled(1), y = filled(1);
  gate held;
  std::vector<pending<void>> before{held.hold_lane(w_.device_of(1))};
  ASSERT_TRUE(held.wait_reached());
  while (before.size() < 20)
    before.push_back(w_.device_of(1).fill(y[1], element{2}, {.room = room_policy::refuse}));
  recording r;
  r.on(0).fill("x", element{5}).launch("troupe.testing.nothing", {}, {}, {});
  r.on(1).fill("y", element{5});
  const auto step = must(w_.record(r, {{"x", x}, {"y", y}}));
  const auto refused = error_of(answer_of(step.run({.room = room_policy::refuse})));
  EXPECT_TRUE(has_code(refused, errc::overloaded));
  EXPECT_NE(text_of(refused).find("request 3 of the step (fill)"), std::string::npos)
      << text_of(refused);
  EXPECT_TRUE(has_code(answer_of(step.run({.deadline = 50ms})), errc::deadline_exceeded));
  auto waits = std::thread{[&] { EXPECT_TRUE(is_ok(answer_of(step.run()))); }};
  held.open();
  waits.join();
}

/// Together its requests count as one; they fill the queue only up to its second bound.
TEST_F(StepWithShortQueues, EntersTheQueueOfAWorldWholeOrNotAtAll) {
  TROUPE_HOST_ONLY("the build is held by a fault plan");
  world_feed feed{system_, w_.actor()};
  const auto before = feed.until(world_phase::ready);
  plan_->add({fault::block, verb::build});
  EXPECT_TRUE(is_ok(answer_of(w_.device_of(0).reset())));
  ASSERT_TRUE(plan_->wait_injected(fault::block, 1, patience));
  refs x;
  for (auto& on : devices_of(w_)) {
    x.push_back(must(on.allocate<element>(count)));
    must(answer_of(on.fill(x.back(), 1u)));
  }
  recording few, many;
  for (int i = 0; i < 3; ++i)
    few.all_reduce("x");
  for (int i = 0; i < 40; ++i)
    many.barrier();
  const auto step = must(w_.record(few, {{"x", x}}));
  const auto too_long = must(w_.record(many, {}));
  for (int i = 0; i < 3; ++i) {
    const auto why = error_of(answer_of(too_long.run({.room = room_policy::refuse})));
    EXPECT_TRUE(has_code(why, errc::overloaded));
    EXPECT_NE(text_of(why).find("request 33 of the step (barrier)"), std::string::npos)
        << text_of(why);
  }
  auto done = step.run({.room = room_policy::refuse});
  EXPECT_FALSE(done.ready());
  EXPECT_TRUE(has_code(answer_of(w_.barrier({.room = room_policy::refuse})), errc::overloaded));
  const auto another = must(w_.record(recording{}.barrier(), {}));
  EXPECT_TRUE(has_code(answer_of(another.run({.room = room_policy::refuse})), errc::overloaded));
  plan_->release();
  EXPECT_TRUE(is_ok(answer_of(done)));
  element want = 1;
  for (int i = 0; i < 3; ++i)
    want *= static_cast<element>(w_.size());
  EXPECT_EQ(content(x), same(want));
}

} // namespace

} // namespace troupe::testing
