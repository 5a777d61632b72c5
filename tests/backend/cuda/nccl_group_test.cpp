#include "backend/cuda/cuda_error.hpp"
#include "backend/cuda/nccl_group.hpp"

#include <nccl.h>

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace troupe::testing {

using detail::group_count;
using detail::group_scope;

/// Calls NCCL with an invalid communicator, which fails.
ncclResult_t fail_in_group() { return ncclSend(nullptr, 0, ncclUint8, 0, nullptr, nullptr); }

/// Returns true if this thread has no open group.
bool none_is_open() { return ncclGroupEnd() == ncclInvalidUsage; }

TEST(NcclGroup, EndsExactlyOnce) {
  {
    group_scope group;
    ASSERT_EQ(group.begun(), ncclSuccess);
    EXPECT_EQ(group.end(), ncclSuccess);
    EXPECT_TRUE(none_is_open());
    EXPECT_EQ(group.end(), ncclSuccess);
  }
  EXPECT_TRUE(none_is_open());
  {
    const group_scope left_by_an_early_return;
  }
  EXPECT_TRUE(none_is_open());
}

TEST(NcclGroup, IsCounted) {
  const auto begun = group_count::begun();
  const auto ended = group_count::ended();
  ASSERT_EQ(group_count::open(), 0u);
  {
    group_scope outer;
    EXPECT_EQ(group_count::open(), 1u);
    {
      const group_scope inner;
      EXPECT_EQ(group_count::begun(), begun + 2);
      EXPECT_EQ(group_count::open(), 2u);
    }
    EXPECT_EQ(group_count::open(), 1u);
    EXPECT_EQ(outer.end(), ncclSuccess);
    EXPECT_EQ(outer.end(), ncclSuccess);
    EXPECT_EQ(group_count::open(), 0u);
  }
  EXPECT_EQ(group_count::begun(), begun + 2);
  EXPECT_EQ(group_count::ended(), ended + 2);
}

TEST(NcclGroup, GivesTheErrorOfItsEndAndLeavesNoneOpen) {
  const auto failures = detail::teardown_errors();
  const auto ended = group_count::ended();
  {
    group_scope group;
    ASSERT_EQ(fail_in_group(), ncclInvalidArgument);
    EXPECT_EQ(group.end(), ncclInvalidArgument);
    EXPECT_EQ(group.end(), ncclInvalidArgument);
  }
  EXPECT_EQ(group_count::ended(), ended + 1);
  EXPECT_EQ(detail::teardown_errors(), failures) << "it was told already";
  EXPECT_TRUE(none_is_open());
  group_scope next;
  EXPECT_EQ(next.end(), ncclSuccess) << "a failure of the group before";
}

TEST(NcclGroup, TellsOfAFailureThatNobodyAskedFor) {
  const auto failures = detail::teardown_errors();
  {
    const group_scope group;
    ASSERT_EQ(fail_in_group(), ncclInvalidArgument);
  }
  EXPECT_EQ(detail::teardown_errors(), failures + 1);
  EXPECT_EQ(group_count::open(), 0u);
  EXPECT_TRUE(none_is_open());
}

TEST(NcclGroup, IsOneOfItsThread) {
  constexpr int threads = 4;
  constexpr int groups = 1000;
  const auto begun = group_count::begun();
  std::atomic<int> failed{0};
  std::vector<std::thread> all;
  for (int i = 0; i < threads; ++i)
    all.emplace_back([&failed, i] {
      for (int j = 0; j < groups; ++j) {
        group_scope group;
        const auto want = (i + j) % 2 == 0 ? ncclSuccess : fail_in_group();
        if (group.end() != want)
          ++failed;
      }
    });
  for (auto& x : all)
    x.join();
  EXPECT_EQ(failed, 0);
  EXPECT_EQ(group_count::begun(), begun + std::uint64_t{threads} * groups);
  EXPECT_EQ(group_count::open(), 0u);
}

} // namespace troupe::testing
