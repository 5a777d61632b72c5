/// Direct collectives: arithmetic of elements, and how the kernels load and store them.
#pragma once

#include "backend/cuda/direct_layout.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace troupe::detail::direct {

/// How elements of type `T` are added: integers wrap, and narrow numbers are added in `float`.
template <class T>
using wide = std::conditional_t<std::is_integral_v<T>, T,
                                std::conditional_t<std::is_same_v<T, double>, double, float>>;

template <class T> TROUPE_DEVICE wide<T> widen(T x) { return static_cast<wide<T>>(x); }
template <class T> TROUPE_DEVICE T narrow(wide<T> x) { return static_cast<T>(x); }

/// An unsigned type in which sums and products of integers wrap.
template <class T>
using wrapping = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;

template <class W> TROUPE_DEVICE W combine(reduction op, W a, W b) {
  if constexpr (std::is_integral_v<W>) {
    using word = wrapping<W>;
    switch (op) {
    case reduction::add:
      return static_cast<W>(static_cast<word>(a) + static_cast<word>(b));
    case reduction::multiply:
      return static_cast<W>(static_cast<word>(a) * static_cast<word>(b));
    case reduction::lesser:
      return b < a ? b : a;
    case reduction::greater:
      return a < b ? b : a;
    }
    return a;
  } else {
    switch (op) {
    case reduction::add:
      return gpu::sum(a, b);
    case reduction::multiply:
      return gpu::product(a, b);
    case reduction::lesser:
      return gpu::least(a, b);
    case reduction::greater:
      return gpu::greatest(a, b);
    }
    return a;
  }
}

template <class T> TROUPE_DEVICE T product(T a, T b) {
  if constexpr (std::is_integral_v<T>)
    return combine<T>(reduction::multiply, a, b);
  else
    return narrow<T>(gpu::product(widen(a), widen(b))); // exact before it is rounded, if narrow
}

/// As many elements as fit into `Word`.
template <class T, class Word> struct elements {
  static constexpr unsigned count = sizeof(Word) / sizeof(T);
  T at[count];

  static TROUPE_DEVICE elements from(Word x) {
    elements result;
    std::memcpy(&result, &x, sizeof x);
    return result;
  }
  TROUPE_DEVICE Word word() const {
    Word result;
    std::memcpy(&result, this, sizeof result);
    return result;
  }
};

/// The factor by which one rank's elements are multiplied before they are combined.
template <class T> struct scaling {
  bool is_on;
  T factor;

  TROUPE_DEVICE T operator()(T x) const { return is_on ? product(factor, x) : x; }
};

template <class T> TROUPE_DEVICE scaling<T> scaling_of(const reduce_arguments& a, unsigned size) {
  if (a.has_factor != 0)
    return {true, elements<T, std::uint64_t>::from(a.factor).at[0]};
  if constexpr (!std::is_integral_v<T>)
    if (a.averages != 0)
      return {true, narrow<T>(static_cast<wide<T>>(1.0 / size))};
  return {};
}

/// Integers are divided after the sum, and the fraction is dropped.
template <class T> TROUPE_DEVICE T finished(const reduce_arguments& a, unsigned size, wide<T> x) {
  if constexpr (std::is_integral_v<T>)
    return a.averages != 0 ? static_cast<T>(x / static_cast<T>(size)) : x;
  else
    return narrow<T>(x);
}

template <class Word> TROUPE_DEVICE bool is_aligned(const void* x) {
  return reinterpret_cast<std::uintptr_t>(x) % sizeof(Word) == 0;
}

/// The `i`th packet's data of `n` elements; what is past the end is 0.
template <class T>
TROUPE_DEVICE std::uint64_t load_packet_data(const T* from, std::size_t n, std::size_t i,
                                             bool aligned) {
  using group = elements<T, std::uint64_t>;
  const std::size_t first = i * group::count;
  if (aligned && first + group::count <= n)
    return reinterpret_cast<const std::uint64_t*>(from)[i];
  group result = group::from(0);
  // Unrolled, so that it stays in registers.
  TROUPE_UNROLL
  for (unsigned k = 0; k < group::count; ++k)
    if (first + k < n)
      result.at[k] = from[first + k];
  return result.word();
}

template <class T>
TROUPE_DEVICE void store_packet_data(T* to, std::size_t n, std::size_t i, bool aligned,
                                     std::uint64_t data) {
  using group = elements<T, std::uint64_t>;
  const std::size_t first = i * group::count;
  if (aligned && first + group::count <= n) {
    reinterpret_cast<std::uint64_t*>(to)[i] = data;
    return;
  }
  const auto all = group::from(data);
  TROUPE_UNROLL
  for (unsigned k = 0; k < group::count; ++k)
    if (first + k < n)
      to[first + k] = all.at[k];
}

} // namespace troupe::detail::direct
