/// Steps that actors run by messages.
#include "step/step_fixture.hpp"

#include <caf/all.hpp>

#include <chrono>
#include <utility>

namespace troupe::testing {

namespace {

class StepMessages : public Step {
protected:
  /// Records x = value, and x = the sum of all ranks' x.
  step sum_of(const refs& x, element value) {
    return must(w_.record(recording{}.fill("x", value).all_reduce("x"), {{"x", x}}));
  }
  /// Returns the error of a request to a world, as an actor makes it.
  caf::error request_error(const world& to, run_step what, std::chrono::nanoseconds deadline) {
    caf::scoped_actor self{system_.get()};
    caf::error result;
    request(self, to, std::move(what), deadline)
        .receive([](const step_done&) {}, [&](const caf::error& why) { result = why; });
    return result;
  }
  element times_ranks(element x) const { return x * static_cast<element>(w_.size()); }
};

TEST_F(StepMessages, RunInTheOrderOfTheActorsRequests) {
  auto x = filled(1), y = filled(0);
  const auto step = must(w_.record(recording{}.copy("y", "x").all_reduce("x"), //
                                   {{"x", x}, {"y", y}}));
  caf::scoped_actor self{system_.get()};
  auto before = request(self, w_, all_reduce{.send = any(x)}, patience);
  auto run = request(self, w_.actor(), run_step{step}, patience);
  auto behind = request(self, w_, all_reduce{.send = any(y)}, patience);
  const auto fails = [](const caf::error& why) { ADD_FAILURE() << describe(why); };
  std::move(before).receive([](const collective_done&) {}, fails);
  step_done done;
  std::move(run).receive([&](const step_done& got) { done = got; }, fails);
  std::move(behind).receive([](const collective_done&) {}, fails);
  EXPECT_NE(done.operation, 0u);
  EXPECT_TRUE(done.ranks.empty());
  EXPECT_EQ(content(x), same(times_ranks(times_ranks(1))));
  EXPECT_EQ(content(y), same(times_ranks(times_ranks(1))));
}

/// Such a message is admitted in the actor of the world.
TEST_F(StepMessages, RunIfTheyAreSentByFunctionsOfCaf) {
  auto x = filled(1);
  EXPECT_TRUE(is_ok(ask<step_done>(system_, w_.actor(), run_step{sum_of(x, 2)})));
  EXPECT_EQ(content(x), same(times_ranks(2)));
}

TEST_F(StepMessages, RunWithTheirOptions) {
  auto x = filled(1);
  const auto step = sum_of(x, 2);
  const auto code_of_run = [&](const request_options& options) {
    return code_of(error_of(ask<step_done>(system_, w_.actor(), run_step{step, options})));
  };
  EXPECT_EQ(code_of_run({.membership = w_.status().membership + 1}), errc::membership_changed);
  EXPECT_EQ(code_of_run({.deadline = -1s}), errc::deadline_exceeded);
  gate held;
  const auto before = held.hold_stream(w_.device_of(0), {}, {x[0]});
  EXPECT_TRUE(has_code(request_error(w_, run_step{step}, 20ms), errc::deadline_exceeded));
  held.open();
  EXPECT_TRUE(is_ok(answer_of(before)));
}

/// The requester does not see the answer before its later requests.
TEST_F(StepMessages, ThatAreRefusedLeaveSkippedBytes) {
  auto other = system_.open_world();
  auto x = filled(1);
  const auto step = sum_of(x, 2);
  EXPECT_TRUE(
      has_code(ask<step_done>(system_, other.actor(), run_step{step}), errc::invalid_argument));
  EXPECT_TRUE(has_code(w_.download(x), errc::skipped));
  EXPECT_TRUE(is_ok(ask<step_done>(system_, w_.actor(), run_step{step})));
  EXPECT_EQ(content(x), same(times_ranks(2)));
}

TEST_F(StepMessages, WithoutAStepOrAWorldAreRefused) {
  EXPECT_TRUE(has_code(ask<step_done>(system_, w_.actor(), run_step{}), errc::invalid_argument));
  EXPECT_TRUE(has_code(request_error(world{}, run_step{must(w_.record({}, {}))}, patience),
                       errc::invalid_argument));
}

} // namespace

} // namespace troupe::testing
