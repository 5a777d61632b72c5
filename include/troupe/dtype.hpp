/// Element types, and the reduce operations of NCCL 2.28.
#pragma once

#include <troupe/detail/caf_compat.hpp>

#include <bit>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace troupe {

/// Element type of a buffer. The complex ones are pairs of float32 or float64: real part, imaginary
/// part.
enum class dtype : std::uint8_t {
  int8,
  uint8,
  int32,
  uint32,
  int64,
  uint64,
  float16,
  bfloat16,
  float32,
  float64,
  float8_e4m3,
  float8_e5m2,
  complex64,
  complex128,
};

/// The types of NCCL 2.28.
inline constexpr dtype real_dtypes[] = {dtype::int8,    dtype::uint8,       dtype::int32,
                                        dtype::uint32,  dtype::int64,       dtype::uint64,
                                        dtype::float16, dtype::bfloat16,    dtype::float32,
                                        dtype::float64, dtype::float8_e4m3, dtype::float8_e5m2};

inline constexpr dtype all_dtypes[] = {
    dtype::int8,        dtype::uint8,       dtype::int32,     dtype::uint32,    dtype::int64,
    dtype::uint64,      dtype::float16,     dtype::bfloat16,  dtype::float32,   dtype::float64,
    dtype::float8_e4m3, dtype::float8_e5m2, dtype::complex64, dtype::complex128};

/// Returns the enumerator's name.
std::string_view to_string(dtype x) noexcept;

/// Parses the enumerators' names and the usual short ones ("f32", "half", "u8", "e4m3").
std::optional<dtype> dtype_from_string(std::string_view name) noexcept;
TROUPE_INSPECT_ENUM(dtype)

/// @units bytes per element
constexpr std::size_t size_of(dtype x) noexcept {
  switch (x) {
  case dtype::int8:
  case dtype::uint8:
  case dtype::float8_e4m3:
  case dtype::float8_e5m2:
    return 1;
  case dtype::float16:
  case dtype::bfloat16:
    return 2;
  case dtype::int32:
  case dtype::uint32:
  case dtype::float32:
    return 4;
  case dtype::int64:
  case dtype::uint64:
  case dtype::float64:
  case dtype::complex64:
    return 8;
  case dtype::complex128:
    return 16;
  }
  return 0;
}

/// Returns whether `x` is an enumerator. A number from outside the process may be none.
constexpr bool is_dtype(dtype x) noexcept { return size_of(x) != 0; }

constexpr bool is_complex(dtype x) noexcept {
  return x == dtype::complex64 || x == dtype::complex128;
}

/// Returns the type of the parts of complex numbers, `x` for other types.
constexpr dtype real_type_of(dtype x) noexcept {
  return x == dtype::complex64 ? dtype::float32 : x == dtype::complex128 ? dtype::float64 : x;
}

/// How a collective combines the ranks' elements; the order of the ranks is unspecified. Integers
/// wrap; their `avg` divides the wrapped sum and drops the fraction. Floating-point `sum` and
/// `prod` round after each step (NCCL sometimes less often). Floating-point `avg` multiplies each
/// rank's element by 1/n, rounds both to the type, and adds. `premul_sum` multiplies each rank's
/// element by that rank's own factor, of the same type, and adds. `min` and `max` ignore NaNs
/// unless all elements are NaN, and treat -0 as less than +0. Complex numbers have no `prod`, `min`
/// and `max`; their parts are combined each by itself.
/// @source NCCL 2.28.9, `hostToDevRedOp` (src/enqueue.cc) and src/device/reduce_kernel.h; CUDA Math
///         API, `__hmin`; PTX ISA, `min`. NCCL guarantees nothing for NaNs and the signs of zeros,
///         and its multicast (NVLS) algorithms may differ there. Multicast algorithms add narrow
///         numbers in `float`.
enum class reduce_op : std::uint8_t { sum, prod, min, max, avg, premul_sum };

/// The operations that need no factors.
inline constexpr reduce_op all_reduce_ops[] = {reduce_op::sum, reduce_op::prod, reduce_op::min,
                                               reduce_op::max, reduce_op::avg};

/// Returns the enumerator's name.
std::string_view to_string(reduce_op x) noexcept;

/// Parses the enumerators' names and "product", "average", "mean".
std::optional<reduce_op> reduce_op_from_string(std::string_view name) noexcept;
TROUPE_INSPECT_ENUM(reduce_op)

/// A narrow floating-point number as stored in memory; arithmetic uses `float`. Conversion from
/// float rounds to nearest, ties to even, and gives the same bits as CUDA. Every NaN becomes the
/// one with all bits set except the sign. In float16 and bfloat16, a value that is too large
/// becomes an infinity. In float8_e4m3 and float8_e5m2, it becomes the largest finite number (448;
/// 57,344) with its sign, and so does an infinity: the OCP specification's saturating conversion.
/// So no arithmetic gives an infinity in float8_e5m2, and float8_e4m3 has none.
/// @source IEEE 754-2019 (binary16); OCP 8-bit Floating Point Specification 1.0; CUDA Math API,
///         "FP8 Intrinsics": the constructors of `__nv_fp8_e4m3` and `__nv_fp8_e5m2`, with which
///         NCCL 2.28.9 computes (src/device/reduce_kernel.h), are `__NV_SATFINITE`
struct float16 {
  std::uint16_t bits = 0;
  float16() = default;
  explicit float16(float x) noexcept;
  explicit operator float() const noexcept;
  static constexpr float16 from_bits(std::uint16_t b) noexcept {
    float16 r;
    r.bits = b;
    return r;
  }
};

struct bfloat16 {
  std::uint16_t bits = 0;
  bfloat16() = default;
  explicit bfloat16(float x) noexcept;
  explicit operator float() const noexcept;
  static constexpr bfloat16 from_bits(std::uint16_t b) noexcept {
    bfloat16 r;
    r.bits = b;
    return r;
  }
};

struct float8_e4m3 {
  std::uint8_t bits = 0;
  float8_e4m3() = default;
  explicit float8_e4m3(float x) noexcept;
  explicit operator float() const noexcept;
  static constexpr float8_e4m3 from_bits(std::uint8_t b) noexcept {
    float8_e4m3 r;
    r.bits = b;
    return r;
  }
};

struct float8_e5m2 {
  std::uint8_t bits = 0;
  float8_e5m2() = default;
  explicit float8_e5m2(float x) noexcept;
  explicit operator float() const noexcept;
  static constexpr float8_e5m2 from_bits(std::uint8_t b) noexcept {
    float8_e5m2 r;
    r.bits = b;
    return r;
  }
};

/// Maps a C++ type to its dtype; undefined for other types.
template <class T> struct dtype_of;
// clang-format off
template <> struct dtype_of<std::int8_t> { static constexpr dtype value = dtype::int8; };
template <> struct dtype_of<std::uint8_t> { static constexpr dtype value = dtype::uint8; };
template <> struct dtype_of<std::int32_t> { static constexpr dtype value = dtype::int32; };
template <> struct dtype_of<std::uint32_t> { static constexpr dtype value = dtype::uint32; };
template <> struct dtype_of<std::int64_t> { static constexpr dtype value = dtype::int64; };
template <> struct dtype_of<std::uint64_t> { static constexpr dtype value = dtype::uint64; };
template <> struct dtype_of<float16> { static constexpr dtype value = dtype::float16; };
template <> struct dtype_of<bfloat16> { static constexpr dtype value = dtype::bfloat16; };
template <> struct dtype_of<float> { static constexpr dtype value = dtype::float32; };
template <> struct dtype_of<double> { static constexpr dtype value = dtype::float64; };
template <> struct dtype_of<float8_e4m3> { static constexpr dtype value = dtype::float8_e4m3; };
template <> struct dtype_of<float8_e5m2> { static constexpr dtype value = dtype::float8_e5m2; };
template <> struct dtype_of<std::complex<float>> { static constexpr dtype value = dtype::complex64; };
template <> struct dtype_of<std::complex<double>> { static constexpr dtype value = dtype::complex128; };
// clang-format on

template <class T> inline constexpr dtype dtype_v = dtype_of<T>::value;

/// A type that can be the element type of a buffer.
template <class T>
concept element = requires { dtype_of<T>::value; };

} // namespace troupe
