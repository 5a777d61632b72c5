/// The answer of a run of a step, made of the answers of its operations.
#include "step/step_run.hpp"
#include "support/expect.hpp"
#include <troupe/world_status.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

/// An operation that its test answers. Notes its early end in a list.
class noted final : public detail::operation_of<detail::nothing> {
public:
  noted(std::size_t index, std::vector<std::size_t>& ended)
      : operation_of("noted", 0), index_(index), ended_(ended) {}

protected:
  void end_early(detail::early_end how) noexcept override {
    ended_.push_back(index_);
    answer(early_answer(how, false));
  }

private:
  const std::size_t index_;
  std::vector<std::size_t>& ended_;
};

class StepRun : public ::testing::Test {
protected:
  /// Begins a run with two operations for each of `requests` requests.
  void begin(std::size_t requests) {
    detail::step_operations all;
    for (std::size_t i = 0; i < 2 * requests; ++i) {
      operations_.push_back(std::make_shared<noted>(i, ended_));
      all.all.push_back(operations_.back());
      all.request_of.push_back(i / 2);
    }
    run_->begin(std::move(all));
  }

  std::shared_ptr<detail::step_run> run_ = std::make_shared<detail::step_run>();
  std::vector<std::size_t> ended_;
  std::vector<std::shared_ptr<noted>> operations_;
};

TEST_F(StepRun, IsAnsweredWithItsLastOperation) {
  begin(2);
  for (std::size_t i : {2, 0, 3}) {
    operations_[i]->answer({});
    EXPECT_FALSE(run_->completed());
  }
  operations_[1]->answer({});
  ASSERT_TRUE(run_->completed());
  EXPECT_TRUE(is_ok(run_->error()));
}

TEST_F(StepRun, HasTheFirstFailureInTheRecordedOrder) {
  begin(3);
  operations_[5]->answer(make_error(errc::stalled, "the last one"));
  operations_[0]->answer({});
  operations_[3]->answer(make_error(errc::launch_failed, "the middle one"));
  for (std::size_t i : {1, 2, 4})
    operations_[i]->answer({});
  EXPECT_TRUE(has_code(run_->error(), errc::launch_failed));
  EXPECT_EQ(failure_of(run_->error())->detail, "request 2 of the step (noted): the middle one");
}

/// A cancelled operation counts as never made: an operation behind it must not run without it.
TEST_F(StepRun, IsCancelledFromItsEnd) {
  begin(2);
  operations_[1]->answer({});
  run_->cancel();
  EXPECT_EQ(ended_, (std::vector<std::size_t>{3, 2, 0}));
  EXPECT_TRUE(has_code(run_->error(), errc::cancelled));
}

TEST_F(StepRun, KeepsTheStatusOfAnError) {
  begin(1);
  world_status now;
  now.membership = 7;
  operations_[0]->answer(
      caf::make_error(errc::membership_changed, failure{.code = errc::membership_changed}, now));
  operations_[1]->answer({});
  ASSERT_TRUE(status_of(run_->error()));
  EXPECT_EQ(status_of(run_->error())->membership, 7u);
}

TEST_F(StepRun, WithoutOperationsIsDone) {
  begin(0);
  ASSERT_TRUE(run_->completed());
  EXPECT_TRUE(is_ok(run_->error()));
}

} // namespace

} // namespace troupe::testing
