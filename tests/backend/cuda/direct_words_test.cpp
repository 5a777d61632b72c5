/// The words by which the kernels of a rank tell the host of their end.

#include "backend/cuda/cuda_event.hpp"
#include "backend/cuda/direct_memory.hpp"

#include <gtest/gtest.h>

#include <cstdint>

namespace troupe::testing {
namespace {

class DirectWords : public ::testing::TestWithParam<std::uint32_t> {
protected:
  /// Returns whether what waits for kernel `number` may begin.
  bool lets_begin(std::uint32_t number) const {
    return detail::kernel_end{.word = &words_.ended, .value = number}.is_over();
  }

  const std::uint32_t former_ = GetParam(); ///< of the communicator that had the words before
  const std::uint32_t last_ = former_ + 3;
  detail::direct_words words_{former_, former_};
};

INSTANTIATE_TEST_SUITE_P(From, DirectWords, ::testing::Values(0u, 1000u, UINT32_MAX - 1));

TEST_P(DirectWords, AreIdleWhenTheLastKernelIsOver) {
  EXPECT_TRUE(words_.idle(former_));
  EXPECT_FALSE(words_.idle(last_));
  words_.stopped = former_ + 2;
  EXPECT_FALSE(words_.idle(last_));
  words_.stopped = last_;
  EXPECT_TRUE(words_.idle(last_));
  EXPECT_FALSE(lets_begin(last_)) << "it was aborted";
  words_.release(last_);
  EXPECT_TRUE(lets_begin(last_));
  EXPECT_TRUE(words_.idle(last_)) << "for the next communicator";
}

TEST_P(DirectWords, AreNotIdleAfterAnEarlyRelease) {
  words_.release_early(last_);
  for (std::uint32_t i = former_; i != last_ + 1; ++i)
    EXPECT_TRUE(lets_begin(i)) << i - former_;
  EXPECT_FALSE(words_.idle(last_));
  words_.release_early(last_);
  EXPECT_FALSE(words_.idle(last_));
  words_.ended = last_; // by the kernel
  EXPECT_TRUE(words_.idle(last_));
}

TEST_P(DirectWords, StayIdleIfTheyAreReleasedEarlyTooLate) {
  words_.ended = last_;
  words_.release_early(last_);
  EXPECT_TRUE(words_.idle(last_));
}

} // namespace
} // namespace troupe::testing
