/// What a part has written whose work is done, and a loss of its device beside it.
#include "lane/kept_result.hpp"
#include "support/core_fixture.hpp"
#include <troupe/error.hpp>

#include <gtest/gtest.h>

#include <memory>
#include <vector>

namespace troupe::detail {

namespace {

using testing::core_system;
using testing::probe;

constexpr int own = 0;

/// Its work has given a verdict.
class judged_probe final : public probe {
public:
  using probe::probe;
  bool has_right_result(const part&) const noexcept override { return false; }
};

caf::error loss_of(int device) {
  return make_error({.code = errc::worker_lost, .detail = "on purpose", .device = device});
}

class KeptResult : public ::testing::Test {
protected:
  std::shared_ptr<probe> of_parts(std::size_t count) {
    return std::make_shared<probe>(std::vector(count, lane()));
  }
  std::shared_ptr<detail::lane> lane() { return system_.lane(); }

private:
  core_system system_;
};

TEST_F(KeptResult, IsNoMoreLostOnceItIsKnown) {
  auto op = of_parts(1);
  keep_result(op->parts()[0], own);
  op->fail(loss_of(own));
  EXPECT_FALSE(op->failed());
  EXPECT_TRUE(op->one_over());
  op->settle();
  EXPECT_TRUE(op->completed());
  EXPECT_FALSE(op->error());
}

TEST_F(KeptResult, IsThereAlthoughTheLossCameFirst) {
  auto op = of_parts(1);
  op->fail(loss_of(own));
  keep_result(op->parts()[0], own);
  EXPECT_TRUE(op->failed());
  EXPECT_TRUE(is_delivered(op->parts()[0]));
}

TEST_F(KeptResult, IsNotThereAfterAnotherFailure) {
  for (const auto& why : {loss_of(own + 1), make_error(errc::cuda_error, "on purpose")}) {
    auto op = of_parts(1);
    op->fail(why);
    keep_result(op->parts()[0], own);
    EXPECT_FALSE(is_delivered(op->parts()[0]));
  }
}

TEST_F(KeptResult, IsLostWithThatOfAnotherPart) {
  auto op = of_parts(2);
  keep_result(op->parts()[0], own);
  op->fail(loss_of(own));
  EXPECT_TRUE(op->failed());
  EXPECT_FALSE(is_delivered(op->parts()[0]));
}

TEST_F(KeptResult, IsLostIfItHasAVerdict) {
  auto op = std::make_shared<judged_probe>(std::vector{lane()});
  keep_result(op->parts()[0], own);
  op->fail(loss_of(own));
  keep_result(op->parts()[0], own);
  EXPECT_TRUE(op->failed());
  EXPECT_FALSE(is_delivered(op->parts()[0]));
}

TEST_F(KeptResult, IsLostIfItIsOfACollective) {
  auto op = of_parts(1);
  op->parts()[0].stream = stream_kind::collective;
  keep_result(op->parts()[0], own);
  op->fail(loss_of(own));
  EXPECT_TRUE(op->failed());
  EXPECT_FALSE(is_delivered(op->parts()[0]));
}

/// What it builds on may fail yet.
TEST_F(KeptResult, IsNotKnownBeforeThatOfEarlierWork) {
  auto before = of_parts(1);
  auto op = of_parts(1);
  before->precede(op, true);
  keep_result(op->parts()[0], own);
  before->fail(make_error(errc::cuda_error, "on purpose"));
  EXPECT_TRUE(op->failed());
  EXPECT_FALSE(is_delivered(op->parts()[0]));
}

} // namespace

} // namespace troupe::detail
