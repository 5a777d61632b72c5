#include "support/expect.hpp"
#include <troupe/bytes.hpp>
#include <troupe/scalar.hpp>

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace troupe {

namespace {

using testing::has_code;
using testing::must;

template <class T> void expect_kept(T x) {
  const scalar s = x;
  EXPECT_TRUE(s);
  EXPECT_EQ(s.type(), dtype_v<T>);
  const auto want = std::bit_cast<std::array<std::byte, sizeof(T)>>(x);
  ASSERT_EQ(s.bytes().size(), sizeof(T)) << to_string(s.type());
  EXPECT_TRUE(std::equal(want.begin(), want.end(), s.bytes().begin())) << to_string(s.type());
  EXPECT_EQ(must(scalar::from_bytes(s.type(), want)), s) << to_string(s.type());
}

TEST(Scalar, KeepsAnElementOfEachType) {
  expect_kept(std::int8_t{-5});
  expect_kept(std::uint8_t{250});
  expect_kept(std::int32_t{-70'000});
  expect_kept(std::uint32_t{4'000'000'000});
  expect_kept(std::int64_t{-5'000'000'000});
  expect_kept(std::uint64_t{18'000'000'000'000'000'000u});
  expect_kept(float16{1.5f});
  expect_kept(bfloat16{-3.0f});
  expect_kept(0.1f);
  expect_kept(0.1);
  expect_kept(float8_e4m3{448.0f});
  expect_kept(float8_e5m2{0.25f});
}

TEST(Scalar, DiffersByTypeAndContent) {
  EXPECT_NE(scalar{0.0f}, scalar{std::int32_t{0}});
  EXPECT_NE(scalar{1.0f}, scalar{2.0f});
  EXPECT_EQ(scalar{1.0f}, scalar{1.0f});
}

TEST(Scalar, IsEmptyByDefault) {
  const scalar none;
  EXPECT_FALSE(none);
  EXPECT_TRUE(none.bytes().empty());
  EXPECT_EQ(none, scalar{});
}

TEST(Scalar, IsNotMadeOfOtherSizesOrTypes) {
  const std::array<std::byte, 4> four{};
  EXPECT_TRUE(has_code(scalar::from_bytes(dtype::float64, four), errc::shape_mismatch));
  EXPECT_TRUE(has_code(scalar::from_bytes(dtype::float16, four), errc::shape_mismatch));
  EXPECT_TRUE(has_code(scalar::from_bytes(static_cast<dtype>(99), four), errc::invalid_argument));
}

struct step {
  std::int32_t number;
  double size;
  friend bool operator==(const step&, const step&) = default;
};

TEST(Bytes, AreReadBack) {
  const step x{17, 0.1};
  const auto bytes = to_bytes(x);
  EXPECT_EQ(bytes.size(), sizeof(step));
  EXPECT_EQ(must(from_bytes<step>(bytes)), x);
  EXPECT_EQ(must(from_bytes<step>(std::as_bytes(std::span{bytes}))), x);
}

TEST(Bytes, OfAnotherSizeAreRefused) {
  auto bytes = to_bytes(step{1, 2});
  bytes.pop_back();
  EXPECT_TRUE(has_code(from_bytes<step>(bytes), errc::shape_mismatch));
  EXPECT_TRUE(
      has_code(from_bytes<std::int32_t>(std::vector<std::uint8_t>{}), errc::shape_mismatch));
}

} // namespace

} // namespace troupe
