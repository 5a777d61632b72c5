// Host memory: parts of buffers, and buffers of parts.

#include "support/expect.hpp"
#include <troupe/host_buffer.hpp>

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace troupe {

namespace {

using testing::has_code;
using testing::must;
using numbers = std::vector<std::int32_t>;

numbers numbers_in(const host_buffer& x) {
  const auto all = x.as<std::int32_t>();
  return {all.begin(), all.end()};
}

TEST(HostBuffer, SplitSharesTheBytes) {
  const host_buffer whole{numbers{1, 2, 3, 4, 5, 6}};
  const auto parts = must(whole.split(3));
  ASSERT_EQ(parts.size(), 3u);
  EXPECT_EQ(numbers_in(parts[0]), (numbers{1, 2}));
  EXPECT_EQ(numbers_in(parts[1]), (numbers{3, 4}));
  EXPECT_EQ(numbers_in(parts[2]), (numbers{5, 6}));
  parts[2].as<std::int32_t>()[1] = 7;
  EXPECT_EQ(numbers_in(whole), (numbers{1, 2, 3, 4, 5, 7}));
}

TEST(HostBuffer, SplitOnlyIntoEqualParts) {
  const host_buffer whole{numbers{1, 2, 3}};
  EXPECT_TRUE(has_code(whole.split(5), errc::shape_mismatch));
  EXPECT_TRUE(has_code(whole.split(0), errc::shape_mismatch));
  EXPECT_TRUE(has_code(host_buffer{}.split(0), errc::shape_mismatch));
  EXPECT_EQ(must(host_buffer{}.split(2)).size(), 2u);
}

TEST(HostBuffer, ConcatenateCopiesInOrder) {
  const std::vector<host_buffer> parts{host_buffer{numbers{1, 2}}, host_buffer{},
                                       host_buffer{numbers{3}}};
  const auto whole = concatenate(parts);
  parts[0].as<std::int32_t>()[0] = 9;
  EXPECT_EQ(numbers_in(whole), (numbers{1, 2, 3}));
  EXPECT_EQ(concatenate({}).size_bytes(), 0u);
}

} // namespace

} // namespace troupe
