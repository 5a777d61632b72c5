// CUDA's results as errors. Needs no GPU.

#include "support/expect.hpp"
#include <troupe/cuda_error.hpp>

#include <string>

namespace troupe::testing {

namespace {

TEST(CudaError, SuccessIsNone) { EXPECT_TRUE(is_ok(error_of(cudaSuccess))); }

TEST(CudaError, HasNameTextAndCode) {
  for (const auto code : {cudaErrorInvalidConfiguration, cudaErrorIllegalAddress}) {
    const auto why = error_of(code);
    EXPECT_TRUE(has_code(why, errc::launch_failed));
    const auto failure = failure_of(why);
    ASSERT_TRUE(failure.has_value());
    EXPECT_EQ(failure->native_code, static_cast<int>(code));
    EXPECT_EQ(failure->native_name, cudaGetErrorName(code));
    EXPECT_NE(describe(why).find(cudaGetErrorString(code)), std::string::npos) << describe(why);
    EXPECT_NE(describe(why).find(failure->native_name), std::string::npos) << describe(why);
  }
}

} // namespace

} // namespace troupe::testing
