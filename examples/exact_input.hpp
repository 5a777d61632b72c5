/// Inputs of an all-reduce with an exactly known result.
#pragma once

#include <troupe/dtype.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <type_traits>

/// Number of elements after which the inputs of `n` ranks repeat.
constexpr std::size_t exact_period(std::size_t n) { return 56 * n; }

template <troupe::element T> T element_from(double x) {
  if constexpr (std::is_arithmetic_v<T>)
    return static_cast<T>(x);
  else
    return T{static_cast<float>(x)};
}

/// Returns element `i` of rank `r` of `n`, small enough that no type rounds on the way to the
/// result.
template <troupe::element T>
double exact_input(troupe::reduce_op op, std::size_t i, std::size_t r, std::size_t n) {
  const auto digit = (5 * i + 3 * r * r + i / 7) % 8;
  if (op == troupe::reduce_op::sum)
    return r < 8 ? static_cast<double>(digit / 4) : 0;
  if (op == troupe::reduce_op::prod)
    return r < 6 ? static_cast<double>(1 + digit / 4) : 1;
  // Each rank's input is divided first, which may round. So only one of them is not 0.
  if (op == troupe::reduce_op::avg && !std::is_integral_v<T>)
    return r == i % n ? 1 : 0;
  return op == troupe::reduce_op::avg && r >= 8 ? 0 : static_cast<double>(digit);
}

/// Returns the value that every rank must have at element `i`.
template <troupe::element T> T exact_result(troupe::reduce_op op, std::size_t i, std::size_t n) {
  auto result = exact_input<T>(op, i, 0, n);
  for (std::size_t r = 1; r < n; ++r) {
    const auto x = exact_input<T>(op, i, r, n);
    if (op == troupe::reduce_op::prod)
      result *= x;
    else if (op == troupe::reduce_op::min)
      result = std::min(result, x);
    else if (op == troupe::reduce_op::max)
      result = std::max(result, x);
    else
      result += x;
  }
  if (op == troupe::reduce_op::avg)
    result /= static_cast<double>(n);
  return element_from<T>(result);
}

template <troupe::element T> bool same_bits(T x, T y) {
  using bytes = std::array<std::byte, sizeof(T)>;
  return std::bit_cast<bytes>(x) == std::bit_cast<bytes>(y);
}
