#include "compute/blas/lru_cache.hpp"

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <string>

namespace troupe::blas {

namespace {

struct plan {
  std::size_t bytes = 100;
  int number = 0;
  std::size_t size_bytes() const noexcept { return bytes; }
};

std::string key(int number) { return "key " + std::to_string(number); }

TEST(LruCache, KeepsWhatWasUsedLast) {
  lru_cache<plan> cache{3, 1 << 20};
  for (int i = 0; i < 3; ++i)
    cache.add(key(i), std::make_shared<plan>(plan{100, i}));
  ASSERT_TRUE(cache.find(key(0)));
  cache.add(key(3), std::make_shared<plan>(plan{100, 3}));
  EXPECT_EQ(cache.size(), 3u);
  EXPECT_FALSE(cache.find(key(1)));
  for (const int i : {0, 2, 3}) {
    const auto found = cache.find(key(i));
    ASSERT_TRUE(found) << i;
    EXPECT_EQ(found->number, i);
  }
}

TEST(LruCache, KeepsWithinItsBoundsForTenThousandShapes) {
  constexpr std::size_t most_bytes = 64'000;
  lru_cache<plan> cache{1000, most_bytes};
  for (int i = 0; i < 10'000; ++i) {
    cache.add(key(i), std::make_shared<plan>(plan{static_cast<std::size_t>(i % 7) * 100, i}));
    ASSERT_LE(cache.size_bytes(), most_bytes);
    ASSERT_LE(cache.size(), 1000u);
    ASSERT_TRUE(cache.find(key(i)));
  }
  EXPECT_GT(cache.size(), 50u);
  cache.clear();
  EXPECT_EQ(cache.size(), 0u);
  EXPECT_EQ(cache.size_bytes(), 0u);
  EXPECT_FALSE(cache.find(key(9'999)));
}

/// A plan that is dropped while it is in use stays until that ends.
TEST(LruCache, KeepsAtLeastTheLastPlan) {
  lru_cache<plan> cache{10, 10};
  cache.add(key(1), std::make_shared<plan>(plan{1000, 1}));
  const auto used = cache.find(key(1));
  ASSERT_TRUE(used);
  cache.add(key(2), std::make_shared<plan>(plan{1000, 2}));
  EXPECT_EQ(cache.size(), 1u);
  EXPECT_FALSE(cache.find(key(1)));
  EXPECT_EQ(used->number, 1);
}

} // namespace

} // namespace troupe::blas
