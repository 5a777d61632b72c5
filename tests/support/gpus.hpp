/// Checks how many GPUs a test needs before it starts.
#pragma once

#include <troupe/backend.hpp>

#include <gtest/gtest.h>

#include <cstdlib>

namespace troupe::testing {

inline int gpus_present() {
  static const int present = [] {
    auto cuda = make_cuda_backend();
    return cuda ? (*cuda)->device_count() : 0;
  }();
  return present;
}

/// Returns how many GPUs are required: TROUPE_REQUIRE_GPUS, or 0.
inline int gpus_required() {
  const char* text = std::getenv("TROUPE_REQUIRE_GPUS");
  return text == nullptr ? 0 : std::atoi(text);
}

} // namespace troupe::testing

/// At the start of a test or of SetUp: skips the test on a machine with fewer than `n` GPUs. If
/// TROUPE_REQUIRE_GPUS requires that many, the test fails instead.
#define TROUPE_NEEDS_GPUS(n)                                                                       \
  do {                                                                                             \
    if (::troupe::testing::gpus_present() < (n)) {                                                 \
      if (::troupe::testing::gpus_required() >= (n))                                               \
        GTEST_FAIL() << "needs " << (n) << " GPUs, sees " << ::troupe::testing::gpus_present();    \
      GTEST_SKIP() << "needs " << (n) << " GPUs, sees " << ::troupe::testing::gpus_present();      \
    }                                                                                              \
  } while (false)
