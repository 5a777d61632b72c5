// What a worker's agent takes for done, while more is being done.

#include "hosts/take_done.hpp"

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

/// What is told first may be all that is looked at: whoever asks for it takes what was begun before
/// it for done, too.
TEST(TakeDone, LeavesNothingThatWasDoneBefore) {
  constexpr int count = 6;
  for (int turn = 0; turn < count; ++turn) { // when so many were looked at, all end in their order
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
