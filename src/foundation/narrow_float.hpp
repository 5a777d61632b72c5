/// Conversions between `float` and narrower binary floating-point formats: integer arithmetic,
/// additions and selects, no tables and almost no branches, so that loops are fast and can
/// vectorize.
#pragma once

#include <bit>
#include <cstdint>

namespace troupe::detail {

/// A binary format with a sign, `Exponent` and `Mantissa` bits, subnormals, and an exponent range
/// inside that of `float`. `Max` is the pattern that overflow gives; the patterns above
/// `LastNumber`, the sign aside, are NaNs.
template <class Bits, int Exponent, int Mantissa, std::uint32_t Max, std::uint32_t LastNumber>
struct narrow_format {
  static float decode(Bits x) noexcept {
    const std::uint32_t magnitude = x & (sign_bit - 1);
    const std::uint32_t sign = (x & sign_bit) << (32 - width);
    const std::uint32_t normal = (magnitude << shift) + rebias;
    // A subnormal gets the leading one of the smallest normal number, and loses it by subtraction.
    const float subnormal =
        std::bit_cast<float>(normal + leading_one) - std::bit_cast<float>(smallest_normal);
    std::uint32_t r =
        magnitude <= last_subnormal ? std::bit_cast<std::uint32_t>(subnormal) : normal;
    r = magnitude >= infinity ? 0x7f800000 : r;
    r = magnitude > LastNumber ? 0x7fffffff : r;
    return std::bit_cast<float>(r | sign);
  }

  static Bits encode(float x) noexcept {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t magnitude = bits & 0x7fffffff;
    const std::uint32_t sign = (bits >> (32 - width)) & sign_bit;
    // To nearest: half of the last kept bit, less one. Ties to even: one more if that bit is set.
    const std::uint32_t half = (1u << (shift - 1)) - 1 + ((magnitude >> shift) & 1);
    const std::uint32_t normal = (magnitude - rebias + half) >> shift;
    // The last bit of the sum has the weight of the smallest subnormal, so the addition rounds.
    const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) +
                                                                 std::bit_cast<float>(subnormals)) -
                                    subnormals;
    std::uint32_t r = normal < Max ? normal : Max;
    r = magnitude < smallest_normal ? subnormal : r;
    r |= sign;
    r = magnitude > 0x7f800000 ? sign_bit - 1 : r;
    return static_cast<Bits>(r);
  }

private:
  static constexpr int width = 1 + Exponent + Mantissa;
  static constexpr int shift = 23 - Mantissa;
  static constexpr std::uint32_t bias = (1u << (Exponent - 1)) - 1;
  static constexpr std::uint32_t sign_bit = 1u << (width - 1);
  static constexpr std::uint32_t last_subnormal = (1u << Mantissa) - 1;
  /// The pattern of infinity; in a format without infinity, a pattern that is no number.
  static constexpr std::uint32_t infinity =
      (LastNumber & last_subnormal) == 0 ? LastNumber : sign_bit;
  // In the representation of `float`:
  static constexpr std::uint32_t leading_one = 1u << 23;
  static constexpr std::uint32_t rebias = (127 - bias) << 23;
  static constexpr std::uint32_t smallest_normal = rebias + leading_one;
  static constexpr std::uint32_t subnormals = smallest_normal + (std::uint32_t{shift} << 23);
};

using float16_format = narrow_format<std::uint16_t, 5, 10, 0x7c00, 0x7c00>;
using float8_e4m3_format = narrow_format<std::uint8_t, 4, 3, 0x7e, 0x7e>;
using float8_e5m2_format = narrow_format<std::uint8_t, 5, 2, 0x7b, 0x7c>;

/// The upper half of a `float`.
struct bfloat16_format {
  static float decode(std::uint16_t x) noexcept {
    return std::bit_cast<float>(static_cast<std::uint32_t>(x) << 16);
  }

  static std::uint16_t encode(float x) noexcept {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return static_cast<std::uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fff : rounded);
  }
};

} // namespace troupe::detail
