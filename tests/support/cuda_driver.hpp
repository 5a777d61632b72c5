/// The functions of the CUDA driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <gtest/gtest.h>

namespace troupe::testing {

/// Returns a function of the driver, to which the tests do not link.
/// @shape since: the first CUDA version with the function in this form
template <class F> F* driver_function(const char* name, unsigned since) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const auto code =
      cudaGetDriverEntryPointByVersion(name, &found, since, cudaEnableDefault, &result);
  EXPECT_EQ(code, cudaSuccess) << name;
  EXPECT_EQ(result, cudaDriverEntryPointSuccess) << name;
  return reinterpret_cast<F*>(found);
}

#define TROUPE_DRIVER(name, since)                                                                 \
  ::troupe::testing::driver_function<decltype(::name)>(#name, since)

} // namespace troupe::testing
