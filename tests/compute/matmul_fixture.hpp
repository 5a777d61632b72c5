/// Matrix products with data, and references in long double.
#pragma once

#include "support/world_fixture.hpp"
#include <troupe/blas.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numbers>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace troupe::testing {

using blas::activation;
using blas::matmul_options;
using blas::precision;
using blas::transpose;
using number = std::complex<long double>;
using numbers = std::vector<number>;

/// Converts between elements of a type and numbers.
inline number read(dtype type, const std::byte* from) {
  const auto as = [&]<class T>(T) {
    T x;
    std::memcpy(&x, from, sizeof x);
    return x;
  };
  switch (type) {
  case dtype::int8:
    return static_cast<long double>(as(std::int8_t{}));
  case dtype::int32:
    return static_cast<long double>(as(std::int32_t{}));
  case dtype::float16:
    return static_cast<float>(as(float16{}));
  case dtype::bfloat16:
    return static_cast<float>(as(bfloat16{}));
  case dtype::float32:
    return as(float{});
  case dtype::float64:
    return as(double{});
  case dtype::float8_e4m3:
    return static_cast<float>(as(float8_e4m3{}));
  case dtype::float8_e5m2:
    return static_cast<float>(as(float8_e5m2{}));
  case dtype::complex64:
    return number{as(std::complex<float>{})};
  case dtype::complex128:
    return number{as(std::complex<double>{})};
  default:
    throw std::logic_error("no matrix has this type");
  }
}

inline void write(dtype type, std::byte* to, number x) {
  const auto as = [&](auto value) { std::memcpy(to, &value, sizeof value); };
  const auto real = static_cast<float>(x.real());
  switch (type) {
  case dtype::int8:
    return as(static_cast<std::int8_t>(x.real()));
  case dtype::int32:
    return as(static_cast<std::int32_t>(x.real()));
  case dtype::float16:
    return as(float16{real});
  case dtype::bfloat16:
    return as(bfloat16{real});
  case dtype::float32:
    return as(real);
  case dtype::float64:
    return as(static_cast<double>(x.real()));
  case dtype::float8_e4m3:
    return as(float8_e4m3{real});
  case dtype::float8_e5m2:
    return as(float8_e5m2{real});
  case dtype::complex64:
    return as(std::complex<float>(x));
  case dtype::complex128:
    return as(std::complex<double>(x));
  default:
    throw std::logic_error("no matrix has this type");
  }
}

/// The relative error of one rounding to a type; 0 for integers.
inline long double unit_of(dtype type) {
  switch (type) {
  case dtype::int8:
  case dtype::int32:
    return 0;
  case dtype::float16:
    return std::ldexp(1.0L, -11);
  case dtype::bfloat16:
    return std::ldexp(1.0L, -8);
  case dtype::float8_e4m3:
    return std::ldexp(1.0L, -4);
  case dtype::float8_e5m2:
    return std::ldexp(1.0L, -3);
  case dtype::float64:
  case dtype::complex128:
    return std::ldexp(1.0L, -53);
  default:
    return std::ldexp(1.0L, -24);
  }
}

/// The types of a product.
struct types {
  dtype a, b, d;
};

inline std::vector<types> all_types() {
  using enum dtype;
  return {{float64, float64, float64},
          {float32, float32, float32},
          {float16, float16, float16},
          {float16, float16, float32},
          {bfloat16, bfloat16, bfloat16},
          {bfloat16, bfloat16, float32},
          {int8, int8, int32},
          {complex64, complex64, complex64},
          {complex128, complex128, complex128},
          {float8_e4m3, float8_e4m3, bfloat16},
          {float8_e4m3, float8_e5m2, float16},
          {float8_e5m2, float8_e4m3, float32},
          {float8_e4m3, float8_e4m3, float8_e4m3}};
}

inline bool is_float8(dtype x) { return x == dtype::float8_e4m3 || x == dtype::float8_e5m2; }

inline std::string name_of(const types& x) {
  std::string result;
  for (const auto type : {x.a, x.b, x.d})
    result += (result.empty() ? "" : "_") + std::string{to_string(type)};
  return result;
}

/// A matrix on the host, and its place in memory with guards around and between its rows.
struct stored {
  dtype type = dtype::float32;
  std::uint64_t rows = 0; // as stored
  std::uint64_t columns = 0;
  std::uint64_t leading = 0;
  std::uint64_t batches = 1;
  std::uint64_t stride = 0;
  transpose op = transpose::none;
  std::vector<std::byte> bytes = {};
  any_gpu_ref memory = {};

  static constexpr std::uint64_t guard = 32; // elements before and behind

  std::uint64_t elements() const { return batches * stride + 2 * guard; }
  std::byte* at(std::uint64_t batch, std::uint64_t row, std::uint64_t column) {
    return bytes.data() + (guard + batch * stride + row * leading + column) * size_of(type);
  }
  /// Returns an element as it is used.
  number used(std::uint64_t batch, std::uint64_t i, std::uint64_t j) {
    const auto x =
        op == transpose::none ? read(type, at(batch, i, j)) : read(type, at(batch, j, i));
    return op == transpose::conjugated ? std::conj(x) : x;
  }
  blas::matrix as_matrix() const {
    return {must(memory.slice(guard, elements() - 2 * guard)), rows, columns, op, leading, stride};
  }
};

/// A matrix product with its data.
struct problem {
  types of;
  std::uint64_t m = 1, n = 1, k = 1;
  transpose op_a = transpose::none, op_b = transpose::none;
  std::uint64_t batches = 1;
  std::uint64_t padding = 0; // elements behind each row
  bool integers = true;      // small ones, so that nothing rounds but the result
  std::uint64_t seed = 1;
};

class Matmul : public ::testing::Test {
protected:
  stored make(dtype type, std::uint64_t rows, std::uint64_t columns, transpose op,
              const problem& x) {
    stored result{type, op == transpose::none ? rows : columns,
                  op == transpose::none ? columns : rows};
    result.leading = result.columns + x.padding;
    result.batches = x.batches;
    result.stride = result.rows * result.leading;
    result.op = op;
    result.bytes = random_bytes(result.elements() * size_of(type), x.seed + rows);
    std::uniform_int_distribution<int> small{-2, 2};
    std::uniform_real_distribution<double> real{-1, 1};
    const auto any = [&] {
      return static_cast<long double>(x.integers ? small(random_) : real(random_));
    };
    for (std::uint64_t b = 0; b < x.batches; ++b)
      for (std::uint64_t i = 0; i < result.rows; ++i)
        for (std::uint64_t j = 0; j < result.columns; ++j)
          write(type, result.at(b, i, j), is_complex(type) ? number{any(), any()} : number{any()});
    upload(result);
    return result;
  }

  void upload(stored& x) {
    x.memory = must(device_.allocate(x.type, x.elements()).wait());
    put(device_, x.memory, x.bytes);
  }

  void make_operands(const problem& x) {
    a_ = make(x.of.a, x.m, x.k, x.op_a, x);
    b_ = make(x.of.b, x.k, x.n, x.op_b, x);
    d_ = make(x.of.d, x.m, x.n, transpose::none, x);
  }

  /// Returns the exact result, before a rounding, and the sum of all magnitudes beside it.
  std::pair<number, long double> exact(const problem& x, std::uint64_t batch, std::uint64_t i,
                                       std::uint64_t j) {
    number sum = 0;
    long double size = 0;
    for (std::uint64_t p = 0; p < x.k; ++p) {
      const auto left = a_.used(batch, i, p);
      const auto right = b_.used(batch, p, j);
      sum += left * right;
      size += std::abs(left) * std::abs(right);
    }
    return {sum, size};
  }

  /// Returns the greatest error of k additions of products, and of a few more roundings, relative
  /// to the sum of their magnitudes: gamma_n = n u / (1 - n u), with another factor of 2 sqrt(2)
  /// for the four products in one of complex numbers, and one of 2 where GPUs cut off instead of
  /// rounding.
  static long double gamma(const problem& x) {
    const auto unit = unit_of(
        x.of.d == dtype::float64 || x.of.d == dtype::complex128 ? dtype::float64 : dtype::float32);
    const auto n = static_cast<long double>(x.k + 6) * unit * 2;
    return n / (1 - n) * (is_complex(x.of.d) ? 2.9L : 1);
  }

  /// For EXPECT_TRUE: `got` is `want`, with sums of magnitude `size`, as far as it can be exact.
  static ::testing::AssertionResult close(const problem& x, number got, number want,
                                          long double size, long double more = 0) {
    // Half of the smallest number of float16. Other results here are never subnormal.
    const auto tiny = x.of.d == dtype::float16 ? std::ldexp(1.0L, -25) : 0;
    const auto sums = x.integers ? 0 : gamma(x) * size;
    const auto limit = sums + more + unit_of(x.of.d) * (std::abs(want) + sums + more) + tiny;
    if (std::abs(got - want) <= limit)
      return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << "got " << got << ", wanted " << want << ", error "
                                         << std::abs(got - want) << ", limit " << limit;
  }

  static constexpr auto no_more = [](auto, auto, auto, number) { return 0.0L; };

  /// For EXPECT_TRUE: each element of d is what `want` returns for its value before, and nothing
  /// around it has changed. `want`: number(batch, i, j, exact product)
  /// @shape more: what an element may differ by besides, as `want` but of long double
  template <class F, class G = decltype(no_more)>
  ::testing::AssertionResult right(const problem& x, F want, G more = no_more) {
    auto before = d_;
    d_.bytes = must(get(device_, d_.memory));
    auto untouched = d_.bytes;
    for (std::uint64_t b = 0; b < x.batches; ++b)
      for (std::uint64_t i = 0; i < x.m; ++i)
        for (std::uint64_t j = 0; j < x.n; ++j) {
          const auto [product, size] = exact(x, b, i, j);
          const auto wanted = want(b, i, j, product);
          const auto seen = close(x, read(x.of.d, d_.at(b, i, j)), wanted,
                                  2 * size + std::abs(wanted), more(b, i, j, product));
          if (!seen)
            return ::testing::AssertionFailure()
                   << "at " << b << ", " << i << ", " << j << ": " << seen.message();
          const auto offset = d_.at(b, i, j) - d_.bytes.data();
          std::copy_n(before.bytes.begin() + offset, size_of(x.of.d), untouched.begin() + offset);
        }
    if (untouched != before.bytes)
      return ::testing::AssertionFailure() << "something around the result has changed";
    return ::testing::AssertionSuccess();
  }
  ::testing::AssertionResult right(const problem& x) {
    return right(x, [](auto, auto, auto, number product) { return product; });
  }

  pending<void> multiply(const matmul_options& what = {}) {
    return blas::matmul(device_, a_.as_matrix(), b_.as_matrix(), d_.as_matrix(), what);
  }

  any_gpu_ref vector_of(dtype type, const numbers& content) {
    std::vector<std::byte> bytes(content.size() * size_of(type));
    for (std::size_t i = 0; i < content.size(); ++i)
      write(type, bytes.data() + i * size_of(type), content[i]);
    auto result = must(device_.allocate(type, content.size()).wait());
    put(device_, result, bytes);
    return result;
  }

  numbers content_of(const any_gpu_ref& x) {
    const auto bytes = must(get(device_, x));
    numbers result(x.count());
    for (std::size_t i = 0; i < result.size(); ++i)
      result[i] = read(x.type(), bytes.data() + i * size_of(x.type()));
    return result;
  }

  test_system system_;
  device device_ = system_.open();
  std::mt19937_64 random_{7};
  stored a_, b_, d_;
};

/// float8 needs b transposed, and sizes that are multiples of 16, as some others on GPUs do.
inline problem of_types(const types& of, std::uint64_t seed = 1) {
  problem result{of, 32, 48, 64};
  result.seed = seed;
  if (size_of(of.a) == 1)
    result.op_b = transpose::transposed;
  return result;
}

/// cuBLASLt has all products of int8 with a as it is and b transposed, and some of the others.
inline bool may_be_refused(const problem& x) {
  return on_cuda() && x.of.a == dtype::int8 &&
         !(x.op_a == transpose::none && x.op_b == transpose::transposed);
}

} // namespace troupe::testing
