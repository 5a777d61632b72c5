// Matrix products against references in long double.

#include "support/world_fixture.hpp"
#include <troupe/blas.hpp>

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

namespace {

using blas::activation;
using blas::matmul_options;
using blas::precision;
using blas::transpose;
using number = std::complex<long double>;
using numbers = std::vector<number>;

/// Workers run the same binary.
[[maybe_unused]] const bool replays = (blas::replay_kernels(), true);

/// Converts between elements of a type and numbers.
number read(dtype type, const std::byte* from) {
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

void write(dtype type, std::byte* to, number x) {
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
long double unit_of(dtype type) {
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

std::vector<types> all_types() {
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

bool is_float8(dtype x) { return x == dtype::float8_e4m3 || x == dtype::float8_e5m2; }

std::string name_of(const types& x) {
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
problem of_types(const types& of, std::uint64_t seed = 1) {
  problem result{of, 32, 48, 64};
  result.seed = seed;
  if (size_of(of.a) == 1)
    result.op_b = transpose::transposed;
  return result;
}

/// cuBLASLt has all products of int8 with a as it is and b transposed, and some of the others.
bool may_be_refused(const problem& x) {
  return on_cuda() && x.of.a == dtype::int8 &&
         !(x.op_a == transpose::none && x.op_b == transpose::transposed);
}

TEST_F(Matmul, IsRightForEachType) {
  for (const auto& of : all_types())
    for (const bool integers : {true, false}) {
      if (!integers && (of.d == dtype::int32 || is_float8(of.a)))
        continue;
      SCOPED_TRACE(name_of(of));
      auto x = of_types(of);
      x.integers = integers;
      for (const bool deterministic : {false, true}) {
        make_operands(x);
        ASSERT_TRUE(is_ok(answer_of(multiply({.deterministic = deterministic}))));
        EXPECT_TRUE(right(x));
      }
    }
}

TEST_F(Matmul, TransposesAndHasLeadingDimensions) {
  using enum transpose;
  for (const auto& of : all_types())
    for (const auto op_a : {none, transposed, conjugated})
      for (const auto op_b : {none, transposed, conjugated}) {
        if (is_float8(of.a) && (op_a != none || op_b != transposed))
          continue;
        if (of.d == dtype::int32 && (op_a == conjugated || op_b == conjugated))
          continue;
        SCOPED_TRACE(name_of(of) + " " + std::string{to_string(op_a)} + " " +
                     std::string{to_string(op_b)});
        auto x = of_types(of, 3);
        x.op_a = op_a;
        x.op_b = op_b;
        x.padding = 16;
        make_operands(x);
        const auto done = answer_of(multiply());
        if (!done && may_be_refused(x)) {
          EXPECT_TRUE(has_code(done, errc::not_supported));
          continue;
        }
        ASSERT_TRUE(is_ok(done));
        EXPECT_TRUE(right(x));
      }
}

TEST_F(Matmul, OfAnySizeOfFloats) {
  for (const auto of : {types{dtype::float32, dtype::float32, dtype::float32},
                        types{dtype::float64, dtype::float64, dtype::float64},
                        types{dtype::bfloat16, dtype::bfloat16, dtype::float32},
                        types{dtype::complex64, dtype::complex64, dtype::complex64}})
    for (const auto& [m, n, k] :
         {std::array{1, 1, 1}, {1, 7, 3}, {5, 1, 2}, {3, 2, 1}, {17, 33, 129}, {64, 1, 64}}) {
      SCOPED_TRACE(name_of(of) + " " + std::to_string(m) + " " + std::to_string(n));
      problem x{of, static_cast<std::uint64_t>(m), static_cast<std::uint64_t>(n),
                static_cast<std::uint64_t>(k)};
      x.integers = false;
      x.padding = 3;
      make_operands(x);
      ASSERT_TRUE(is_ok(answer_of(multiply())));
      EXPECT_TRUE(right(x));
    }
}

TEST_F(Matmul, ScalesAndAdds) {
  for (const auto& of : all_types()) {
    if (is_float8(of.d))
      continue; // c has another type
    SCOPED_TRACE(name_of(of));
    auto x = of_types(of, 4);
    x.k = 16;
    make_operands(x);
    auto before = d_;
    const number alpha = is_complex(of.d) ? number{2, -1} : number{2};
    ASSERT_TRUE(is_ok(
        answer_of(multiply({.alpha = std::complex<double>(alpha), .beta = -3.0})))); // in place
    EXPECT_TRUE(right(x, [&](auto b, auto i, auto j, number product) {
      return alpha * product - 3.0L * read(of.d, before.at(b, i, j));
    }));
    auto c = make(of.d, x.m, x.n, transpose::none, x);
    ASSERT_TRUE(is_ok(answer_of(multiply({.beta = 1.0, .c = c.as_matrix()}))));
    EXPECT_TRUE(right(x, [&](auto b, auto i, auto j, number product) {
      return product + read(of.d, c.at(b, i, j));
    }));
  }
}

TEST_F(Matmul, HasBatches) {
  for (const auto& of : all_types()) {
    SCOPED_TRACE(name_of(of));
    auto x = of_types(of, 5);
    x.batches = 5;
    make_operands(x);
    ASSERT_TRUE(is_ok(answer_of(multiply({.batches = 5}))));
    EXPECT_TRUE(right(x));
  }
}

TEST_F(Matmul, HasBatchesByAddress) {
  for (const auto of : {types{dtype::float32, dtype::float32, dtype::float32},
                        types{dtype::bfloat16, dtype::bfloat16, dtype::bfloat16},
                        types{dtype::complex128, dtype::complex128, dtype::complex128}}) {
    SCOPED_TRACE(name_of(of));
    const auto x = of_types(of, 6);
    std::vector<stored> as, bs, ds;
    std::vector<blas::matrix> a, b, d;
    for (int i = 0; i < 7; ++i) {
      make_operands(x);
      as.push_back(a_);
      bs.push_back(b_);
      ds.push_back(d_);
      a.push_back(a_.as_matrix());
      b.push_back(b_.as_matrix());
      d.push_back(d_.as_matrix());
    }
    ASSERT_TRUE(is_ok(answer_of(blas::matmul(device_, a, b, d))));
    for (std::size_t i = 0; i < ds.size(); ++i) {
      a_ = as[i];
      b_ = bs[i];
      d_ = ds[i];
      EXPECT_TRUE(right(x)) << i;
    }
    b.pop_back();
    EXPECT_TRUE(has_code(answer_of(blas::matmul(device_, a, b, d)), errc::shape_mismatch));
  }
}

TEST_F(Matmul, AddsABiasAndAppliesAnActivation) {
  for (const auto type : {dtype::float32, dtype::bfloat16, dtype::float16})
    for (const auto function : {activation::none, activation::relu, activation::gelu}) {
      SCOPED_TRACE(std::string{to_string(type)} + " " + std::string{to_string(function)});
      auto x = of_types({type, type, type}, 8);
      x.integers = function != activation::gelu;
      make_operands(x);
      numbers bias(x.n);
      for (std::size_t i = 0; i < bias.size(); ++i)
        bias[i] = static_cast<long double>(i % 5) - 2;
      ASSERT_TRUE(
          is_ok(answer_of(multiply({.bias = vector_of(type, bias), .function = function}))));
      EXPECT_TRUE(right(x, [&](auto, auto, auto j, number product) -> number {
        const auto v = (product + bias[j]).real();
        if (function == activation::relu)
          return std::max(v, 0.0L);
        if (function == activation::none)
          return v;
        const auto root = std::sqrt(2 / std::numbers::pi_v<long double>);
        return v / 2 * (1 + std::tanh(root * (v + 0.044715L * v * v * v)));
      }));
    }
}

/// Returns the derivative of GELU at `v`, and the error that GPUs may make in it: their tanh is
/// 1 - 2 / (1 + exp(2 y)), with an exponential that is not exact.
/// @source CUDA C++ programming guide, "Intrinsic Functions": __expf is within 2 + |1.173 x| ulp
std::pair<long double, long double> gelu_derivative(long double v) {
  const auto ulp = std::ldexp(1.0L, -23);
  const auto root = std::sqrt(2 / std::numbers::pi_v<long double>);
  const auto y = root * (v + 0.044715L * v * v * v);
  const auto slope = root * (1 + 3 * 0.044715L * v * v);
  const auto t = std::tanh(y);
  const auto bell = v / 2 * (1 - t * t) * slope;
  const auto of_t = (1 - t * t) / 2 * (2 + 1.173L * std::abs(2 * y)) * ulp + 2 * ulp;
  const auto rounding = 4 * ulp * ((1 + std::abs(t)) / 2 + std::abs(v / 2 * slope));
  return {(1 + t) / 2 + bell, of_t * (0.5L + std::abs(v * t * slope)) + rounding};
}

/// The gradient of a layer: d = (gradient * transposed weights) times the derivative of the
/// activation at what it was applied to, and the sums of its columns.
TEST_F(Matmul, ComputesGradientsOfActivations) {
  for (const auto function : {activation::relu, activation::gelu}) {
    SCOPED_TRACE(to_string(function));
    const bool relu = function == activation::relu;
    problem x{{dtype::float32, dtype::float32, dtype::float32}, 32, 128, 16};
    x.integers = relu;
    make_operands(x);
    const auto kept = must(
        device_
            .allocate(relu ? dtype::uint8 : dtype::float32, relu ? x.m * x.n / 8 : x.m * x.n, true)
            .wait());
    ASSERT_TRUE(is_ok(answer_of(multiply({.function = function, .auxiliary = kept}))));
    std::vector<std::pair<number, long double>> before;
    for (std::uint64_t i = 0; i < x.m; ++i)
      for (std::uint64_t j = 0; j < x.n; ++j)
        before.push_back(exact(x, 0, i, j));
    const auto gamma_of_first = gamma(x);
    x.seed = 9;
    make_operands(x);
    const auto sums = must(device_.allocate(dtype::float32, x.n).wait());
    const auto gradient = relu ? activation::relu_gradient : activation::gelu_gradient;
    ASSERT_TRUE(is_ok(
        answer_of(multiply({.function = gradient, .auxiliary = kept, .bias_gradient = sums}))));
    const auto derivative = [&](long double v) {
      return relu ? (v >= 0 ? 1.0L : 0.0L) : gelu_derivative(v).first;
    };
    EXPECT_TRUE(right(
        x,
        [&](auto, auto i, auto j, number product) {
          return product * derivative(before[i * x.n + j].first.real());
        },
        [&](auto, auto i, auto j, number product) -> long double {
          const auto& [v, size] = before[i * x.n + j];
          // The second derivative is at most 1.13.
          const auto of_kept = 1.13L * (gamma_of_first * size + unit_of(x.of.d) * std::abs(v));
          return relu ? 0 : std::abs(product) * (of_kept + gelu_derivative(v.real()).second);
        }));
    const auto got = content_of(sums);
    for (std::uint64_t j = 0; j < x.n; ++j) {
      long double want = 0;
      long double size = 0;
      for (std::uint64_t i = 0; i < x.m; ++i) {
        const auto v = read(dtype::float32, d_.at(0, i, j)).real();
        want += v;
        size += std::abs(v);
      }
      EXPECT_LE(std::abs(got[j].real() - want), 64 * std::ldexp(1.0L, -23) * size) << j;
    }
  }
}

TEST_F(Matmul, ScalesFloat8) {
  const auto one = [&](float x) { return vector_of(dtype::float32, {number{x}}); };
  auto x = of_types({dtype::float8_e4m3, dtype::float8_e4m3, dtype::bfloat16}, 10);
  make_operands(x);
  ASSERT_TRUE(is_ok(answer_of(multiply({.a_scale = one(0.5F), .b_scale = one(4.0F)}))));
  EXPECT_TRUE(right(x, [](auto, auto, auto, number product) { return 2.0L * product; }));
  x = of_types({dtype::float8_e4m3, dtype::float8_e4m3, dtype::float8_e4m3}, 11);
  make_operands(x);
  ASSERT_TRUE(is_ok(answer_of(multiply({.d_scale = one(0.25F)}))));
  EXPECT_TRUE(right(x, [](auto, auto, auto, number product) { return 0.25L * product; }));
}

TEST_F(Matmul, ComputesInTf32WhereAsked) {
  auto x = of_types({dtype::float32, dtype::float32, dtype::float32}, 12);
  x.integers = true; // 10 bits are enough for them
  make_operands(x);
  ASSERT_TRUE(is_ok(answer_of(multiply({.compute = precision::tf32}))));
  EXPECT_TRUE(right(x));
}

TEST_F(Matmul, GivesTheSameBitsWhereDeterministic) {
  auto x = of_types({dtype::float32, dtype::float32, dtype::float32}, 13);
  x.m = x.n = 8;
  x.k = 20'000; // one that is worth dividing
  x.integers = false;
  make_operands(x);
  std::vector<std::byte> first;
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(is_ok(answer_of(multiply({.deterministic = true}))));
    const auto got = must(get(device_, d_.memory));
    if (first.empty())
      first = got;
    ASSERT_EQ(got, first);
  }
  EXPECT_TRUE(right(x));
}

/// The kernel of a product that is repeated with the same memory is launched in another way.
TEST_F(Matmul, IsRightForNewContentsOfTheSameMemory) {
  for (const auto& of : all_types()) {
    SCOPED_TRACE(name_of(of));
    auto x = of_types(of, 15);
    make_operands(x);
    const auto refill = [&](stored& y) {
      const auto content = make(y.type, y.op == transpose::none ? y.rows : y.columns,
                                y.op == transpose::none ? y.columns : y.rows, y.op, x);
      y.bytes = content.bytes;
      put(device_, y.memory, y.bytes);
    };
    for (int i = 0; i < 5; ++i) {
      refill(a_);
      refill(b_);
      refill(d_);
      ASSERT_TRUE(is_ok(answer_of(multiply())));
      EXPECT_TRUE(right(x)) << i;
    }
  }
}

TEST_F(Matmul, TravelsAsAMessage) {
  const auto x = of_types({dtype::float32, dtype::float32, dtype::float32}, 14);
  make_operands(x);
  auto what = must(blas::matmul_message(a_.as_matrix(), b_.as_matrix(), d_.as_matrix()));
  ASSERT_TRUE(is_ok(ask<void>(system_, must(device_.actor()), std::move(what))));
  EXPECT_TRUE(right(x));
}

/// Each rank multiplies its own matrices, and then all add their results.
TEST_F(Matmul, IsPartOfAStep) {
  const auto world = system_.open_world();
  const types floats{dtype::float32, dtype::float32, dtype::float32};
  auto x = of_types(floats, 20);
  std::vector<std::vector<any_gpu_ref>> refs(4);
  std::vector<numbers> wanted(2, numbers(x.m * x.n));
  const auto bias = numbers(x.n, 1);
  for (const auto& on : devices_of(world)) {
    device_ = on;
    make_operands(x);
    for (std::uint64_t i = 0; i < x.m; ++i)
      for (std::uint64_t j = 0; j < x.n; ++j)
        wanted[0][i * x.n + j] += exact(x, 0, i, j).first + 1.0L;
    const auto tail = [](const stored& m) { return m.as_matrix().memory; };
    refs[0].push_back(tail(a_));
    refs[1].push_back(tail(b_));
    refs[2].push_back(tail(d_));
    refs[3].push_back(vector_of(dtype::float32, bias));
    x.seed += 10;
  }
  recording r;
  blas::matmul(r, {"a", x.m, x.k}, {"b", x.k, x.n}, {"d", x.m, x.n}, {.bias = "bias"});
  r.all_reduce("d");
  const auto step =
      must(world.record(r, {{"a", refs[0]}, {"b", refs[1]}, {"d", refs[2]}, {"bias", refs[3]}}));
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(is_ok(answer_of(step.run())));
    for (std::size_t rank = 0; rank < refs[2].size(); ++rank) {
      device_ = devices_of(world)[rank];
      EXPECT_EQ(content_of(must(refs[2][rank].slice(0, x.m * x.n))), wanted[0]);
    }
  }
  blas::matmul(r, {"a", x.m, x.k}, {"b", x.n, x.k}, {"d", x.m, x.n});
  const auto why = error_of(
      world.record(r, {{"a", refs[0]}, {"b", refs[1]}, {"d", refs[2]}, {"bias", refs[3]}}));
  EXPECT_TRUE(has_code(why, errc::shape_mismatch));
  EXPECT_NE(describe(why).find("request 3 of the step"), std::string::npos) << describe(why);
}

TEST_F(Matmul, IsPreparedWithoutATouch) {
  const auto x = of_types({dtype::float32, dtype::float32, dtype::float32}, 15);
  make_operands(x);
  const auto before = must(get(device_, d_.memory));
  ASSERT_TRUE(
      is_ok(answer_of(blas::prepare(device_, a_.as_matrix(), b_.as_matrix(), d_.as_matrix()))));
  EXPECT_TRUE(holds(device_, d_.memory, before));
  ASSERT_TRUE(is_ok(answer_of(multiply())));
  EXPECT_TRUE(right(x));
}

TEST_F(Matmul, ManyAtATimeAreRight) {
  const auto x = of_types({dtype::float32, dtype::float32, dtype::float32}, 16);
  std::vector<stored> as, bs, ds;
  std::vector<pending<void>> all;
  for (int i = 0; i < 64; ++i) {
    make_operands(x);
    as.push_back(a_);
    bs.push_back(b_);
    ds.push_back(d_);
  }
  for (std::size_t i = 0; i < ds.size(); ++i)
    all.push_back(blas::matmul(device_, as[i].as_matrix(), bs[i].as_matrix(), ds[i].as_matrix()));
  for (std::size_t i = 0; i < ds.size(); ++i) {
    ASSERT_TRUE(is_ok(answer_of(all[i])));
    a_ = as[i];
    b_ = bs[i];
    d_ = ds[i];
    EXPECT_TRUE(right(x)) << i;
  }
}

/// Each change of a right request that makes it wrong, and its error.
TEST_F(Matmul, RefusesWhatIsWrong) {
  const types floats{dtype::float32, dtype::float32, dtype::float32};
  const auto x = of_types(floats, 17);
  make_operands(x);
  const auto good_a = a_.as_matrix();
  const auto good_b = b_.as_matrix();
  const auto good_d = d_.as_matrix();
  const auto before = must(get(device_, d_.memory));
  const auto refused = [&](errc code, const blas::matrix& a, const blas::matrix& b,
                           const blas::matrix& d, const matmul_options& what = {}) {
    const auto answer = blas::matmul(device_, a, b, d, what);
    EXPECT_TRUE(answer.ready()); // at once
    EXPECT_TRUE(has_code(answer_of(answer), code));
    EXPECT_TRUE(holds(device_, d_.memory, before));
  };
  const auto with = [](blas::matrix m, auto change) {
    change(m);
    return m;
  };
  refused(errc::shape_mismatch, with(good_a, [](auto& m) { --m.columns; }), good_b, good_d);
  refused(errc::shape_mismatch, good_a, with(good_b, [](auto& m) { m.op = transpose::transposed; }),
          good_d);
  refused(errc::out_of_range, with(good_a, [](auto& m) { m.leading = 1'000'000; }), good_b, good_d);
  refused(errc::out_of_range, with(good_a, [](auto& m) { m.leading = SIZE_MAX; }), good_b, good_d);
  refused(errc::invalid_argument, with(good_a, [](auto& m) { m.leading = 5; }), good_b, good_d);
  refused(errc::invalid_argument, with(good_a, [](auto& m) { m.rows = 0; }), good_b,
          with(good_d, [](auto& m) { m.rows = 0; }));
  refused(errc::invalid_argument, with(good_a, [](auto& m) { m.op = static_cast<transpose>(9); }),
          good_b, good_d);
  refused(errc::out_of_range, good_a, good_b, good_d, {.batches = 2});
  refused(errc::invalid_argument, good_a, good_b, good_d, {.batches = 0});
  refused(errc::not_supported, good_a, good_b, good_d, {.batches = std::uint64_t{1} << 40});
  refused(errc::invalid_argument, good_a, good_b, good_d, {.alpha = {0, 1}});
  refused(errc::invalid_argument, good_a, good_b, good_d,
          {.function = activation::relu_gradient}); // without auxiliary
  refused(errc::invalid_argument, good_a, good_b, good_d,
          {.function = static_cast<activation>(77)});
  refused(errc::shape_mismatch, good_a, good_b, good_d,
          {.bias = must(device_.allocate(dtype::float16, x.n).wait())});
  refused(errc::out_of_range, good_a, good_b, good_d,
          {.bias = must(device_.allocate(dtype::float32, x.n - 1).wait())});
  refused(errc::invalid_argument, good_a, good_b, good_d,
          {.a_scale = must(device_.allocate(dtype::float32, 1).wait())});
  refused(errc::invalid_argument, good_a, good_b, // d overlaps a
          with(good_d, [&](auto& m) {
            m.memory = good_a.memory;
            m.leading = 48;
            m.rows = 32;
          }));
  const auto halves = must(device_.allocate(dtype::float16, 10'000).wait());
  refused(errc::not_supported, with(good_a, [&](auto& m) { m.memory = halves; }), good_b, good_d);
  const auto words = must(device_.allocate(dtype::uint32, 10'000).wait());
  refused(errc::not_supported, with(good_a, [&](auto& m) { m.memory = words; }),
          with(good_b, [&](auto& m) { m.memory = words; }), good_d);
  refused(errc::stale_ref, with(good_a, [](auto& m) { m.memory = {}; }), good_b, good_d);
  ASSERT_TRUE(is_ok(answer_of(multiply())));
  EXPECT_TRUE(right(x));
}

TEST_F(Matmul, RefusesMemoryThatIsGoneOrSkipped) {
  const auto x = of_types({dtype::float32, dtype::float32, dtype::float32}, 18);
  make_operands(x);
  const auto failing = launch_failure(device_, "on purpose", {b_.memory});
  answer_of(failing);
  EXPECT_TRUE(has_code(answer_of(multiply()), errc::indeterminate));
  EXPECT_TRUE(has_code(device_.download(must(gpu_ref<float>::from(d_.memory))), errc::skipped));
  must(answer_of(device_.reset()));
  EXPECT_TRUE(has_code(answer_of(multiply()), errc::stale_ref));
  make_operands(x);
  ASSERT_TRUE(is_ok(answer_of(multiply())));
  EXPECT_TRUE(right(x));
}

TEST_F(Matmul, WithForgedArgumentsIsRefused) {
  const auto x = of_types({dtype::float32, dtype::float32, dtype::float32}, 19);
  make_operands(x);
  auto good = must(blas::matmul_message(a_.as_matrix(), b_.as_matrix(), d_.as_matrix()));
  const auto answer = [&](const launch& what) {
    return answer_of(device_.launch(what.name, what.arguments, what.reads, what.writes));
  };
  auto short_one = good;
  short_one.arguments.pop_back();
  EXPECT_TRUE(has_code(answer(short_one), errc::shape_mismatch));
  auto without = good;
  without.reads.pop_back();
  EXPECT_TRUE(has_code(answer(without), errc::invalid_argument));
  auto with = good;
  with.writes.push_back(b_.memory);
  EXPECT_TRUE(has_code(answer(with), errc::invalid_argument));
  for (std::size_t i = 0; i < good.arguments.size(); ++i) { // no byte does harm
    auto forged = good;
    forged.arguments[i] ^= 0x80;
    static_cast<void>(answer(forged));
  }
  make_operands(x);
  ASSERT_TRUE(is_ok(answer_of(multiply())));
  EXPECT_TRUE(right(x));
}

} // namespace

} // namespace troupe::testing
