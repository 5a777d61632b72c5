/// Waits for conditions that have no notification.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace troupe::testing {

/// For EXPECT_TRUE: blocks until `condition` holds. Other threads must make it true.
/// @param limit a test that waits longer has failed
template <class F>
::testing::AssertionResult eventually(F condition,
                                      std::chrono::nanoseconds limit = std::chrono::seconds{60}) {
  using clock = std::chrono::steady_clock;
  constexpr int short_looks = 100; // most conditions become true soon
  const auto until = clock::now() + limit;
  for (int looks = 0; !condition(); ++looks) {
    if (clock::now() > until)
      return ::testing::AssertionFailure() << "it never came";
    if (looks < short_looks)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::chrono::milliseconds{1});
  }
  return ::testing::AssertionSuccess();
}

} // namespace troupe::testing
