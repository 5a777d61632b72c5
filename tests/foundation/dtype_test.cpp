#include "support/reference.hpp"
#include <troupe/dtype.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <ios>
#include <iterator>
#include <limits>
#include <optional>
#include <random>
#include <set>
#include <string_view>
#include <utility>

namespace {

using namespace troupe;
namespace reference = troupe::testing;

TEST(DtypeNames, RoundTrip) {
  std::set<std::string_view> names;
  for (const dtype x : all_dtypes) {
    EXPECT_EQ(dtype_from_string(to_string(x)), x) << to_string(x);
    EXPECT_TRUE(names.insert(to_string(x)).second) << to_string(x);
  }
  EXPECT_EQ(names.size(), 14u);
}

TEST(DtypeNames, UnderstandsTheUsualShortOnes) {
  using enum dtype;
  const std::pair<std::string_view, dtype> names[] = {{"i8", int8},
                                                      {"u8", uint8},
                                                      {"i32", int32},
                                                      {"u32", uint32},
                                                      {"i64", int64},
                                                      {"u64", uint64},
                                                      {"f16", float16},
                                                      {"fp16", float16},
                                                      {"half", float16},
                                                      {"bf16", bfloat16},
                                                      {"f32", float32},
                                                      {"float", float32},
                                                      {"f64", float64},
                                                      {"double", float64},
                                                      {"e4m3", float8_e4m3},
                                                      {"e5m2", float8_e5m2},
                                                      {"int", int32},
                                                      {"fp32", float32},
                                                      {"fp64", float64},
                                                      {"f8e4m3", float8_e4m3},
                                                      {"f8e5m2", float8_e5m2},
                                                      {"fp8_e4m3", float8_e4m3},
                                                      {"fp8_e5m2", float8_e5m2},
                                                      {"c64", complex64},
                                                      {"c128", complex128}};
  for (const auto& [name, type] : names)
    EXPECT_EQ(dtype_from_string(name), type) << name;
}

TEST(DtypeNames, RefusesOthers) {
  for (const std::string_view name : {"", "float3", "float322", "Float32", " int8", "unknown"})
    EXPECT_EQ(dtype_from_string(name), std::nullopt) << name;
  EXPECT_EQ(to_string(static_cast<dtype>(99)), "unknown");
}

TEST(Dtype, ComplexTypesHaveTwoParts) {
  for (const dtype x : real_dtypes) {
    EXPECT_FALSE(is_complex(x)) << to_string(x);
    EXPECT_EQ(real_type_of(x), x);
  }
  for (const dtype x : {dtype::complex64, dtype::complex128}) {
    EXPECT_TRUE(is_complex(x));
    EXPECT_EQ(size_of(x), 2 * size_of(real_type_of(x)));
  }
  EXPECT_EQ(dtype_v<std::complex<float>>, dtype::complex64);
  EXPECT_EQ(dtype_v<std::complex<double>>, dtype::complex128);
}

TEST(Dtype, IsOneOfThoseThatThereAre) {
  for (int number = 0; number < 256; ++number) {
    const auto x = static_cast<dtype>(number);
    EXPECT_EQ(is_dtype(x), std::ranges::find(all_dtypes, x) != std::end(all_dtypes)) << number;
  }
}

TEST(ReduceOpNames, RoundTrip) {
  for (const reduce_op x : all_reduce_ops)
    EXPECT_EQ(reduce_op_from_string(to_string(x)), x) << to_string(x);
  EXPECT_EQ(reduce_op_from_string("product"), reduce_op::prod);
  EXPECT_EQ(reduce_op_from_string("average"), reduce_op::avg);
  EXPECT_EQ(reduce_op_from_string("mean"), reduce_op::avg);
  EXPECT_EQ(reduce_op_from_string("summ"), std::nullopt);
  EXPECT_EQ(reduce_op_from_string(""), std::nullopt);
  EXPECT_EQ(to_string(static_cast<reduce_op>(99)), "unknown");
}

template <class T> class ElementType : public ::testing::Test {};

using element_types =
    ::testing::Types<std::int8_t, std::uint8_t, std::int32_t, std::uint32_t, std::int64_t,
                     std::uint64_t, float16, bfloat16, float, double, float8_e4m3, float8_e5m2>;
TYPED_TEST_SUITE(ElementType, element_types);

TYPED_TEST(ElementType, HasTheSizeOfItsDtype) {
  static_assert(element<TypeParam>);
  EXPECT_EQ(size_of(dtype_v<TypeParam>), sizeof(TypeParam));
}

TEST(NarrowFloat, HasTheBitsOfTheFormats) {
  EXPECT_EQ(float16{1.0f}.bits, 0x3c00);
  EXPECT_EQ(float16{-2.0f}.bits, 0xc000);
  EXPECT_EQ(float16{65504.0f}.bits, 0x7bff);
  EXPECT_EQ(float16{0x1p-24f}.bits, 0x0001);
  EXPECT_EQ(float16{1.0f / 3}.bits, 0x3555);
  EXPECT_EQ(bfloat16{1.0f}.bits, 0x3f80);
  EXPECT_EQ(bfloat16{1.0f / 3}.bits, 0x3eab);
  EXPECT_EQ(bfloat16{0x1p-133f}.bits, 0x0001);
  EXPECT_EQ(float8_e4m3{1.0f}.bits, 0x38);
  EXPECT_EQ(float8_e4m3{448.0f}.bits, 0x7e);
  EXPECT_EQ(float8_e4m3{-0x1p-9f}.bits, 0x81);
  EXPECT_EQ(float8_e5m2{1.0f}.bits, 0x3c);
  EXPECT_EQ(float8_e5m2{57344.0f}.bits, 0x7b);
  EXPECT_EQ(float8_e5m2{0x1p-16f}.bits, 0x01);
}

template <class T> class NarrowFloatOf : public ::testing::Test {
protected:
  using bits_type = decltype(T::bits);

  static constexpr dtype type = dtype_v<T>;
  static constexpr unsigned patterns = 1u << (8 * sizeof(T));
  static constexpr unsigned sign_bit = patterns / 2;
  static constexpr bool saturates = sizeof(T) == 1;

  static T from_bits(unsigned pattern) { return T::from_bits(static_cast<bits_type>(pattern)); }

  static unsigned largest() {
    static const unsigned result = [] {
      unsigned r = 0;
      while (std::isfinite(reference::decode(type, r + 1)))
        ++r;
      return r;
    }();
    return result;
  }

  /// Compares the conversion of x and -x with the search for the nearest number.
  static void check(float x) {
    if (std::isnan(x))
      return;
    for (const float y : {x, -x}) {
      const auto want = std::isinf(y) ? infinity(std::signbit(y))
                                      : static_cast<unsigned>(reference::encode_nearest(type, y));
      ASSERT_EQ(T{y}.bits, want) << y << " = 0x" << std::hex << std::bit_cast<std::uint32_t>(y);
    }
  }

  static unsigned infinity(bool negative) {
    return (negative ? sign_bit : 0) | (saturates ? largest() : largest() + 1);
  }
};

using narrow_types = ::testing::Types<float16, bfloat16, float8_e4m3, float8_e5m2>;
TYPED_TEST_SUITE(NarrowFloatOf, narrow_types);

TYPED_TEST(NarrowFloatOf, DecodesEveryPattern) {
  for (unsigned i = 0; i < this->patterns; ++i) {
    const auto got = static_cast<float>(this->from_bits(i));
    const long double want = reference::decode(this->type, i);
    ASSERT_EQ(std::isnan(got), std::isnan(want)) << i;
    if (std::isnan(want))
      continue;
    ASSERT_EQ(static_cast<long double>(got), want) << i;
    ASSERT_EQ(std::signbit(got), std::signbit(want)) << i;
  }
}

TYPED_TEST(NarrowFloatOf, GetsEveryPatternBack) {
  for (unsigned i = 0; i < this->patterns; ++i) {
    const auto x = static_cast<float>(this->from_bits(i));
    const unsigned want = std::isnan(x)   ? this->sign_bit - 1
                          : std::isinf(x) ? this->infinity(std::signbit(x))
                                          : i;
    ASSERT_EQ(TypeParam{x}.bits, want) << i;
  }
}

TYPED_TEST(NarrowFloatOf, RoundsToNearestEvenAtEveryBoundary) {
  // Includes the boundary between the largest number and the next one that the format would have.
  const unsigned largest = this->largest();
  for (unsigned i = 0; i <= largest; ++i) {
    const long double low = reference::decode(this->type, i);
    const long double below = i == 0 ? 0 : reference::decode(this->type, i - 1);
    const long double high = i == largest ? 2 * low - below : reference::decode(this->type, i + 1);
    for (const long double exact : {low, (low + high) / 2}) {
      const auto x = static_cast<float>(exact);
      if (!std::isfinite(x))
        continue;
      ASSERT_EQ(x, exact);
      float up = x;
      float down = x;
      for (int step = 0; step < 3; ++step) {
        ASSERT_NO_FATAL_FAILURE(this->check(up));
        ASSERT_NO_FATAL_FAILURE(this->check(down));
        up = std::nextafter(up, std::numeric_limits<float>::max());
        down = std::nextafter(down, 0.0f);
      }
    }
  }
}

TYPED_TEST(NarrowFloatOf, RoundsRandomFloats) {
  std::mt19937 random{20};
  // First all floats, then floats in the range of the type.
  for (int i = 0; i < 500'000; ++i)
    ASSERT_NO_FATAL_FAILURE(
        this->check(std::bit_cast<float>(static_cast<std::uint32_t>(random()))));
  const int lowest = std::ilogb(reference::decode(this->type, 1)) - 2;
  const int highest = std::ilogb(reference::decode(this->type, this->largest())) + 1;
  std::uniform_real_distribution<float> mantissa{1, 2};
  std::uniform_int_distribution exponent{lowest, highest};
  for (int i = 0; i < 500'000; ++i)
    ASSERT_NO_FATAL_FAILURE(this->check(std::ldexp(mantissa(random), exponent(random))));
}

TYPED_TEST(NarrowFloatOf, TreatsWhatIsNotFinite) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(TypeParam{infinity}.bits, this->infinity(false));
  EXPECT_EQ(TypeParam{-infinity}.bits, this->infinity(true));
  EXPECT_EQ(TypeParam{std::numeric_limits<float>::max()}.bits, this->infinity(false));
  for (const std::uint32_t nan : {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0xff800001u, 0xffffffffu})
    EXPECT_EQ(TypeParam{std::bit_cast<float>(nan)}.bits, this->sign_bit - 1) << nan;
}

} // namespace
