#include "foundation/reduction.hpp"

#include "foundation/narrow_float.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace troupe::detail {

namespace {

/// How to compute with elements of type T: `load` gives the type to compute in, `store` rounds or
/// wraps.
template <class T> struct arithmetic;

template <std::integral T> struct arithmetic<T> {
  // At least `unsigned`: a shorter type would be promoted to `int`, which must not overflow.
  using value = std::common_type_t<std::make_unsigned_t<T>, unsigned>;
  static value load(T x) noexcept { return static_cast<value>(x); }
  static T store(value x) noexcept { return static_cast<T>(x); }
};

template <std::floating_point T> struct arithmetic<T> {
  using value = T;
  static T load(T x) noexcept { return x; }
  static T store(T x) noexcept { return x; }
};

template <class T, class Format> struct narrow_arithmetic {
  using value = float;
  static float load(T x) noexcept { return Format::decode(x.bits); }
  static T store(float x) noexcept { return T::from_bits(Format::encode(x)); }
};

template <> struct arithmetic<float16> : narrow_arithmetic<float16, float16_format> {};
template <> struct arithmetic<bfloat16> : narrow_arithmetic<bfloat16, bfloat16_format> {};
template <> struct arithmetic<float8_e4m3> : narrow_arithmetic<float8_e4m3, float8_e4m3_format> {};
template <> struct arithmetic<float8_e5m2> : narrow_arithmetic<float8_e5m2, float8_e5m2_format> {};

template <class T> using value_of = typename arithmetic<T>::value;

/// Returns the lesser of two elements. -0 is less than +0, and a NaN is taken only if both are. No
/// short-circuit, so that it vectorizes.
template <class T> T lesser(T a, T b) noexcept {
  if constexpr (std::integral<T>)
    return b < a ? b : a;
  else {
    const auto x = arithmetic<T>::load(a);
    const auto y = arithmetic<T>::load(b);
    const bool second = (y < x) | ((y == x) & std::signbit(y)) | (x != x);
    return arithmetic<T>::store(second ? y : x);
  }
}

template <class T> T greater(T a, T b) noexcept {
  if constexpr (std::integral<T>)
    return b > a ? b : a;
  else {
    const auto x = arithmetic<T>::load(a);
    const auto y = arithmetic<T>::load(b);
    const bool second = (y > x) | ((y == x) & !std::signbit(y)) | (x != x);
    return arithmetic<T>::store(second ? y : x);
  }
}

/// Calls `f(i)` for all i < count, most of them in loops of a fixed length, which compilers
/// vectorize even if they weigh size against speed.
template <class F> void for_each_index(std::size_t count, F f) noexcept {
  constexpr std::size_t length = 256;
  std::size_t i = 0;
  for (; count - i >= length; i += length)
    for (std::size_t j = 0; j < length; ++j)
      f(i + j);
  for (; i < count; ++i)
    f(i);
}

template <class T>
void reduce_typed(reduce_op op, T* __restrict to, const T* __restrict from,
                  std::size_t count) noexcept {
  using a = arithmetic<T>;
  switch (op) {
  case reduce_op::sum:
  case reduce_op::avg:
  case reduce_op::premul_sum:
    return for_each_index(
        count, [=](std::size_t i) { to[i] = a::store(a::load(to[i]) + a::load(from[i])); });
  case reduce_op::prod:
    return for_each_index(
        count, [=](std::size_t i) { to[i] = a::store(a::load(to[i]) * a::load(from[i])); });
  case reduce_op::min:
    return for_each_index(count, [=](std::size_t i) { to[i] = lesser(to[i], from[i]); });
  case reduce_op::max:
    return for_each_index(count, [=](std::size_t i) { to[i] = greater(to[i], from[i]); });
  }
}

template <class T> void scale_typed(T* __restrict data, std::size_t count, T factor) noexcept {
  using a = arithmetic<T>;
  const auto by = a::load(factor);
  for_each_index(count, [=](std::size_t i) { data[i] = a::store(a::load(data[i]) * by); });
}

/// Calls `f` with a null pointer to the C++ type of `type`.
template <class F> void with_type(dtype type, F f) noexcept {
  switch (type) {
  case dtype::int8:
    return f(static_cast<std::int8_t*>(nullptr));
  case dtype::uint8:
    return f(static_cast<std::uint8_t*>(nullptr));
  case dtype::int32:
    return f(static_cast<std::int32_t*>(nullptr));
  case dtype::uint32:
    return f(static_cast<std::uint32_t*>(nullptr));
  case dtype::int64:
    return f(static_cast<std::int64_t*>(nullptr));
  case dtype::uint64:
    return f(static_cast<std::uint64_t*>(nullptr));
  case dtype::float16:
    return f(static_cast<float16*>(nullptr));
  case dtype::bfloat16:
    return f(static_cast<bfloat16*>(nullptr));
  case dtype::float32:
    return f(static_cast<float*>(nullptr));
  case dtype::float64:
    return f(static_cast<double*>(nullptr));
  case dtype::float8_e4m3:
    return f(static_cast<float8_e4m3*>(nullptr));
  case dtype::float8_e5m2:
    return f(static_cast<float8_e5m2*>(nullptr));
  case dtype::complex64:
  case dtype::complex128:
    return; // no collective reduces them whole
  }
}

} // namespace

void reduce_into(dtype type, reduce_op op, void* accumulator, const void* operand,
                 std::size_t count) noexcept {
  with_type(type, [=]<class T>(T*) {
    reduce_typed(op, static_cast<T*>(accumulator), static_cast<const T*>(operand), count);
  });
}

void scale(dtype type, void* data, std::size_t count, const void* factor) noexcept {
  with_type(type, [=]<class T>(T*) {
    T by;
    std::memcpy(&by, factor, sizeof by);
    scale_typed(static_cast<T*>(data), count, by);
  });
}

void begin_average(dtype type, void* data, std::size_t count, int ranks) noexcept {
  with_type(type, [=]<class T>(T*) {
    if constexpr (!std::integral<T>)
      scale_typed(static_cast<T*>(data), count,
                  arithmetic<T>::store(static_cast<value_of<T>>(1.0 / ranks)));
  });
}

void finish_average(dtype type, void* data, std::size_t count, int ranks) noexcept {
  with_type(type, [=]<class T>(T*) {
    if constexpr (std::integral<T>) {
      // Wide enough for `ranks` and signed as T: -x / n would be wrong in unsigned arithmetic.
      using wide = std::common_type_t<T, std::conditional_t<std::is_signed_v<T>, int, unsigned>>;
      const auto divisor = static_cast<wide>(ranks);
      T* __restrict to = static_cast<T*>(data);
      for_each_index(count, [=](std::size_t i) { to[i] = static_cast<T>(wide{to[i]} / divisor); });
    }
  });
}

void reduce(dtype type, reduce_op op, std::span<const void* const> inputs,
            std::span<void* const> outputs, std::size_t count,
            std::span<const void* const> factors) noexcept {
  // Blocks that fit into the L1 cache. Results go to other memory first: an output may be an input.
  constexpr std::size_t block_bytes = 8192;
  alignas(64) std::array<std::byte, block_bytes> result;
  alignas(64) std::array<std::byte, block_bytes> prepared;
  const std::size_t size = size_of(type);
  const int ranks = static_cast<int>(inputs.size());
  const bool prepares = op == reduce_op::avg || op == reduce_op::premul_sum;
  const auto prepare = [&](std::size_t rank, void* data, std::size_t n) {
    if (op == reduce_op::avg)
      begin_average(type, data, n, ranks);
    else
      scale(type, data, n, factors[rank]);
  };
  const std::size_t total = count * size;
  for (std::size_t at = 0; at < total; at += block_bytes) {
    const std::size_t bytes = std::min(block_bytes, total - at);
    const std::size_t n = bytes / size;
    for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
      const std::byte* operand = static_cast<const std::byte*>(inputs[rank]) + at;
      if (rank == 0 || prepares) {
        auto& copy = rank == 0 ? result : prepared;
        std::memcpy(copy.data(), operand, bytes);
        operand = copy.data();
        if (prepares)
          prepare(rank, copy.data(), n);
      }
      if (rank > 0)
        reduce_into(type, op, result.data(), operand, n);
    }
    if (op == reduce_op::avg)
      finish_average(type, result.data(), n, ranks);
    for (void* output : outputs)
      std::memcpy(static_cast<std::byte*>(output) + at, result.data(), bytes);
  }
}

} // namespace troupe::detail
