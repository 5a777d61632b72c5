// Matrix products against references in long double.

#include "compute/matmul_fixture.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <string>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

/// Workers run the same binary.
[[maybe_unused]] const bool replays = (blas::replay_kernels(), true);

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

} // namespace

} // namespace troupe::testing
