// Events that a worker's agent reports as done while more are becoming done.

#include "remote/agent_worker.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace troupe::testing {

namespace {

using detail::take_done;

TEST(TakeDone, TakesWhatIsDoneInItsOrder) {
  std::vector<int> all{1, 2, 3, 4, 5};
  EXPECT_EQ(take_done(all, [](int x) { return x % 2 == 0; }), (std::vector{2, 4}));
  EXPECT_EQ(all, (std::vector{1, 3, 5}));
  EXPECT_TRUE(take_done(all, [](int) { return false; }).empty());
  EXPECT_EQ(all, (std::vector{1, 3, 5}));
}

/// The receiver may look only at the first event that is reported. It then assumes that events
/// recorded before it are done too.
TEST(TakeDone, LeavesNothingThatWasDoneBefore) {
  constexpr int count = 6;
  for (int turn = 0; turn < count; ++turn) { // after this many checks all become done, in order
    std::vector<int> all{0, 1, 2, 3, 4, 5};
    int asked = 0;
    int done = 1;
    const auto taken = take_done(all, [&](int x) {
      const bool result = x < done;
      if (asked++ == turn)
        done = count;
      return result;
    });
    for (int i = 0; const auto x : taken)
      EXPECT_EQ(x, i++) << "all were done after look " << turn;
    EXPECT_EQ(taken.size() + all.size(), std::size_t{count});
  }
}

} // namespace

} // namespace troupe::testing
