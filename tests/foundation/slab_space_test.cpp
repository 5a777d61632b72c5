/// Ranges of slabs, against a plain map of bytes.

#include "foundation/slab_space.hpp"
#include "support/random.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <random>
#include <vector>

namespace troupe::testing {

namespace {

using detail::slab_range;
using detail::slab_space;

constexpr std::size_t unit = slab_space::alignment;

/// Which units of each slab are taken.
using taken_units = std::map<std::uint32_t, std::vector<bool>>;

bool is_any_taken(const std::vector<bool>& of) {
  return std::find(of.begin(), of.end(), true) != of.end();
}

std::size_t longest_free(const taken_units& all) {
  std::size_t longest = 0;
  for (auto& [number, slab] : all) {
    std::size_t run = 0;
    for (const bool taken : slab) {
      run = taken ? 0 : run + 1;
      longest = std::max(longest, run);
    }
  }
  return longest;
}

/// Marks the units of a range. Before, none of them may be marked so.
void mark(taken_units& all, const slab_range& x, bool taken) {
  ASSERT_EQ(x.begin % unit, 0u);
  ASSERT_EQ(x.size_bytes % unit, 0u);
  auto& slab = all.at(x.slab);
  ASSERT_LE(x.begin + x.size_bytes, slab.size() * unit);
  for (auto i = x.begin / unit; i < (x.begin + x.size_bytes) / unit; ++i) {
    ASSERT_NE(slab[i], taken) << "unit " << i << " of slab " << x.slab;
    slab[i] = taken;
  }
}

class SlabSpace : public ::testing::TestWithParam<int> {};

TEST_P(SlabSpace, GivesOutEveryFreeByteOnce) {
  std::mt19937_64 random{static_cast<std::uint64_t>(GetParam())};
  slab_space space;
  taken_units model;
  std::vector<slab_range> held;
  for (int step = 0; step < 2000; ++step) {
    const auto what = pick(random, 0, 99);
    if (what < 4) {
      const auto units = pick(random, 1, 200);
      if (const auto number = space.add(units * unit))
        ASSERT_TRUE(model.emplace(*number, std::vector<bool>(units)).second);
      else
        ASSERT_EQ(model.size(), slab_space::most_slabs);
    } else if (what < 55) {
      const auto size = pick(random, 1, 40 * unit);
      const auto units = (size + unit - 1) / unit;
      const auto got = space.take(size);
      ASSERT_EQ(got.has_value(), longest_free(model) >= units);
      if (got) {
        ASSERT_EQ(got->size_bytes, units * unit);
        mark(model, *got, true);
        held.push_back(*got);
      }
    } else if (!held.empty()) {
      std::swap(held[pick(random, 0, held.size() - 1)], held.back());
      const auto x = held.back();
      held.pop_back();
      mark(model, x, false);
      const bool is_empty = space.give_back(x);
      ASSERT_EQ(is_empty, !is_any_taken(model.at(x.slab)));
      if (is_empty && chance(random, 0.5)) {
        space.remove(x.slab);
        model.erase(x.slab);
      }
    }
    if (HasFatalFailure())
      return;
    std::size_t taken = 0;
    std::size_t all = 0;
    for (auto& [number, slab] : model) {
      taken += static_cast<std::size_t>(std::count(slab.begin(), slab.end(), true)) * unit;
      all += slab.size() * unit;
    }
    ASSERT_EQ(space.taken_bytes(), taken);
    ASSERT_EQ(space.free_bytes(), all - taken);
    ASSERT_EQ(space.slabs(), model.size());
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, SlabSpace, ::testing::Range(1, 21));

TEST(SlabSpace, TakesTheSmallestRangeThatIsLargeEnough) {
  slab_space space;
  const auto large = space.add(100 * unit);
  const auto small = space.add(10 * unit);
  ASSERT_TRUE(large && small);
  EXPECT_EQ(space.take(8 * unit)->slab, *small);
  EXPECT_EQ(space.take(3 * unit)->slab, *large);
  EXPECT_EQ(space.take(2 * unit)->slab, *small);
}

TEST(SlabSpace, HasALimitedNumberOfSlabs) {
  slab_space space;
  for (std::size_t i = 0; i < slab_space::most_slabs; ++i)
    ASSERT_TRUE(space.add(unit));
  EXPECT_FALSE(space.add(unit));
  space.remove(17);
  EXPECT_EQ(space.add(unit), std::optional<std::uint32_t>{17});
}

TEST(SlabSpace, HasNoRoomForSizesThatOverflow) {
  slab_space space;
  ASSERT_TRUE(space.add(100 * unit));
  EXPECT_FALSE(space.take(SIZE_MAX));
  EXPECT_FALSE(space.take(SIZE_MAX - unit + 1));
}

} // namespace

} // namespace troupe::testing
