/// What a test on GPUs asks for before it starts.
#pragma once

#include <troupe/backend.hpp>

#include <gtest/gtest.h>

#include <cstdlib>

namespace troupe::testing {

/// How many GPUs the CUDA backend sees.
inline int gpus_present() {
  static const int present = [] {
    auto cuda = make_cuda_backend();
    return cuda ? (*cuda)->device_count() : 0;
  }();
  return present;
}

/// How many there must be: TROUPE_REQUIRE_GPUS, or 0.
inline int gpus_required() {
  const char* text = std::getenv("TROUPE_REQUIRE_GPUS");
  return text == nullptr ? 0 : std::atoi(text);
}

} // namespace troupe::testing

/// At the start of a test, or of SetUp: skips it on a machine with fewer than `n` GPUs, and fails
/// it there if TROUPE_REQUIRE_GPUS promises that many.
#define TROUPE_NEEDS_GPUS(n)                                                                       \
  do {                                                                                             \
    if (::troupe::testing::gpus_present() < (n)) {                                                 \
      if (::troupe::testing::gpus_required() >= (n))                                               \
        GTEST_FAIL() << "needs " << (n) << " GPUs, sees " << ::troupe::testing::gpus_present();    \
      GTEST_SKIP() << "needs " << (n) << " GPUs, sees " << ::troupe::testing::gpus_present();      \
    }                                                                                              \
  } while (false)
