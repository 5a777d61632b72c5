// Requests for matrix products that are wrong, forged, or at the limits of what is right.

#include "compute/blas/arguments.hpp"
#include "operation/launch_registry.hpp"
#include "support/world_fixture.hpp"
#include <troupe/blas.hpp>
#include <troupe/bytes.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

using blas::activation;
using blas::matmul_options;
using blas::precision;
using blas::transpose;

constexpr const char* launch_name = "troupe.blas.matmul";

/// Square matrices of so many rows, which are full of one number.
class MatmulRequest : public ::testing::Test {
protected:
  static constexpr std::uint64_t n = 16;

  blas::matrix filled(dtype type, scalar with) {
    auto memory = must(device_.allocate(type, n * n).wait());
    must(answer_of(device_.fill(memory, with)));
    return {memory, n, n};
  }
  blas::matrix floats(float with) { return filled(dtype::float32, scalar{with}); }
  any_gpu_ref uninitialized(dtype type, std::size_t count) {
    return must(device_.allocate(type, count).wait());
  }

  /// For EXPECT_TRUE: the request is refused at once.
  static ::testing::AssertionResult refused(errc code, const pending<void>& x) {
    if (!x.ready())
      return ::testing::AssertionFailure() << "it is not refused at once";
    return has_code(x.result(), code);
  }

  test_system system_;
  device device_ = system_.open();
};

TEST_F(MatmulRequest, OfFloat8NeedsTheTransposesOfHopper) {
  const auto one = scalar{float8_e4m3{1.0F}};
  auto a = filled(dtype::float8_e4m3, one);
  auto b = filled(dtype::float8_e4m3, one);
  const auto d = filled(dtype::bfloat16, scalar{bfloat16{0.0F}});
  const auto answer = blas::matmul(device_, a, b, d);
  EXPECT_TRUE(refused(errc::not_supported, answer));
  EXPECT_NE(describe(answer.result().error()).find("b transposed"), std::string::npos);
  b.op = transpose::transposed;
  a.op = transpose::transposed;
  EXPECT_TRUE(refused(errc::not_supported, blas::matmul(device_, a, b, d)));
  const auto fives = filled(dtype::float8_e5m2, scalar{float8_e5m2{1.0F}});
  EXPECT_TRUE(refused(errc::not_supported, blas::matmul(device_, fives, fives, d)));
}

TEST_F(MatmulRequest, OfIntegersHasIntegersAsFactors) {
  const auto a = filled(dtype::int8, scalar{std::int8_t{1}});
  const auto d = filled(dtype::int32, scalar{std::int32_t{0}});
  constexpr auto infinity = std::numeric_limits<double>::infinity();
  constexpr auto nan = std::numeric_limits<double>::quiet_NaN();
  for (const double wrong : {0.5, 2147483648.0, -2147483649.0, 1e300, infinity, -infinity, nan}) {
    EXPECT_TRUE(refused(errc::invalid_argument, blas::matmul(device_, a, a, d, {.alpha = wrong})))
        << wrong;
    EXPECT_TRUE(refused(errc::invalid_argument, blas::matmul(device_, a, a, d, {.beta = wrong})))
        << wrong;
  }
}

TEST_F(MatmulRequest, RefusesOptionsThatDoNotFit) {
  const auto a = floats(1);
  const auto d = floats(0);
  const auto doubles = filled(dtype::float64, scalar{1.0});
  const auto scale = uninitialized(dtype::float32, 1);
  const auto vector = uninitialized(dtype::float32, n);
  const auto values = uninitialized(dtype::float32, n * n);
  const auto bits = uninitialized(dtype::uint8, n * 128 / 8);
  const auto refuses = [&](errc code, const matmul_options& what) {
    EXPECT_TRUE(refused(code, blas::matmul(device_, a, a, d, what)));
  };
  EXPECT_TRUE(refused(errc::invalid_argument, blas::matmul(device_, doubles, doubles, doubles,
                                                           {.compute = precision::tf32})));
  EXPECT_TRUE(refused(errc::not_supported,
                      blas::matmul(device_, doubles, doubles, filled(dtype::float64, scalar{0.0}),
                                   {.bias = uninitialized(dtype::float64, n)})));
  refuses(errc::invalid_argument, {.auxiliary = values}); // of no activation
  refuses(errc::invalid_argument, {.bias_gradient = vector});
  refuses(errc::invalid_argument, {.function = activation::gelu, .bias_gradient = vector});
  refuses(errc::invalid_argument,
          {.bias = vector, .function = activation::relu_gradient, .auxiliary = bits});
  refuses(errc::shape_mismatch, {.function = activation::relu, .auxiliary = values});
  refuses(errc::shape_mismatch, {.function = activation::gelu, .auxiliary = bits});
  refuses(errc::invalid_argument,
          {.function = activation::relu, .auxiliary = bits, .auxiliary_leading = 64});
  refuses(errc::out_of_range,
          {.function = activation::relu, .auxiliary = bits, .auxiliary_leading = 256});
  refuses(errc::out_of_range, {.function = activation::gelu,
                               .auxiliary = values,
                               .auxiliary_leading = std::uint64_t{1} << 62});
  refuses(errc::invalid_argument, {.d_scale = scale});
  refuses(errc::shape_mismatch, {.beta = 1.0, .c = doubles});
  refuses(errc::invalid_argument,
          {.beta = 1.0, .c = {floats(0).memory, n, n, transpose::transposed}});
  refuses(errc::shape_mismatch, {.beta = 1.0, .c = {floats(0).memory, n / 2, n}});
  EXPECT_TRUE(refused(errc::invalid_argument,
                      blas::matmul(device_, a, a, {d.memory, n, n, {}, n, 1}, {.batches = 2})));
  EXPECT_TRUE(holds(device_, d.memory, std::vector<float>(n * n, 0)));
}

TEST_F(MatmulRequest, RefusesAnyOverlapOfWhatIsWritten) {
  const auto memory = uninitialized(dtype::float32, 8 * n * n);
  const auto part = [&](std::uint64_t first) {
    return blas::matrix{must(memory.slice(first, n * n)), n, n};
  };
  must(answer_of(device_.fill(memory, scalar{1.0F})));
  const auto a = part(0);
  const auto d = part(4 * n * n);
  const auto refuses = [&](const pending<void>& x) {
    EXPECT_TRUE(refused(errc::invalid_argument, x));
  };
  refuses(blas::matmul(device_, a, a, part(n * n - 1)));
  refuses(blas::matmul(device_, part(n * n - 1), a, part(2 * n * n - 2)));
  refuses(blas::matmul(device_, a, a, d, {.bias = must(d.memory.slice(n * n - n, n))}));
  refuses(blas::matmul(device_, a, a, d,
                       {.function = activation::gelu, .auxiliary = part(5 * n * n - 1).memory}));
  // c is d itself, or elsewhere. It may overlap a.
  refuses(blas::matmul(device_, a, a, d, {.beta = 1.0, .c = part(4 * n * n + 1)}));
  EXPECT_TRUE(is_ok(answer_of(blas::matmul(device_, a, a, d, {.beta = 1.0, .c = d}))));
  EXPECT_TRUE(is_ok(answer_of(blas::matmul(device_, a, a, d, {.beta = 1.0, .c = part(1)}))));
  // The distance of batches does not matter where there is only one.
  auto same = d;
  same.batch_stride = 5 * n * n;
  EXPECT_TRUE(is_ok(answer_of(blas::matmul(device_, a, a, d, {.beta = 1.0, .c = same}))));
}

TEST_F(MatmulRequest, RefusesOverlapInBatchesByAddress) {
  const auto memory = uninitialized(dtype::float32, 16 * n * n);
  const auto part = [&](std::uint64_t first) {
    return blas::matrix{must(memory.slice(first, n * n)), n, n};
  };
  must(answer_of(device_.fill(memory, scalar{1.0F})));
  const std::vector<blas::matrix> a{part(0), part(n * n), part(0)};
  const std::vector<blas::matrix> d{part(4 * n * n), part(8 * n * n), part(6 * n * n)};
  EXPECT_TRUE(is_ok(answer_of(blas::matmul(device_, a, a, d))));
  EXPECT_TRUE(is_ok(answer_of(blas::matmul(device_, a, a, d, {.beta = 1.0})))); // in place
  auto wrong = d;
  wrong[2] = part(8 * n * n - 1); // overlaps the second one
  EXPECT_TRUE(refused(errc::invalid_argument, blas::matmul(device_, a, a, wrong)));
  wrong[2] = part(1); // overlaps a
  EXPECT_TRUE(refused(errc::invalid_argument, blas::matmul(device_, a, a, wrong)));
  const std::vector<blas::matrix> c{d[1], d[0], d[2]}; // of other products
  EXPECT_TRUE(refused(errc::invalid_argument, blas::matmul(device_, a, a, d, {.beta = 1.0}, c)));
}

/// No list of addresses is taken for a matrix, or a matrix for a list.
TEST_F(MatmulRequest, ByAddressWithForgedFlagsIsRefused) {
  const auto a = floats(1);
  const auto d = floats(0);
  const auto good = must(blas::matmul_message(a, a, d));
  const auto answer = [&](const std::function<void(blas::product&)>& forge,
                          std::vector<any_gpu_ref> reads, std::vector<any_gpu_ref> writes) {
    auto x = must(from_bytes<blas::product>(good.arguments));
    forge(x);
    return answer_of(device_.launch(launch_name, to_bytes(x), std::move(reads), std::move(writes)));
  };
  EXPECT_TRUE(has_code(answer([](auto& x) { x.by_address = 1; }, good.reads, good.writes),
                       errc::invalid_argument));
  EXPECT_TRUE(has_code(answer([](auto& x) { x.by_address = x.only_prepares = 1; },
                              {a.memory, a.memory, d.memory}, {}),
                       errc::invalid_argument));
  EXPECT_TRUE(
      has_code(answer(
                   [](auto& x) {
                     x.by_address = x.only_prepares = 1;
                     x.batches = 2;
                   },
                   {a.memory, a.memory, a.memory, a.memory, d.memory, floats(0).memory}, {}),
               errc::invalid_argument));
  EXPECT_TRUE(holds(device_, d.memory, std::vector<float>(n * n, 0)));
}

/// Each bit of the arguments is changed. Nothing but the results changes, whatever the answer.
TEST_F(MatmulRequest, WithForgedBitsDoesNoHarm) {
  const auto memory = uninitialized(dtype::float32, 3 * n * n);
  must(answer_of(device_.fill(memory, scalar{1.0F})));
  const auto a = floats(1);
  const blas::matrix d{must(memory.slice(n * n, n * n)), n, n};
  const auto good = must(blas::matmul_message(a, a, d));
  for (std::size_t i = 0; i < good.arguments.size() * 8; ++i) {
    auto forged = good.arguments;
    forged[i / 8] = static_cast<std::uint8_t>(forged[i / 8] ^ 1U << i % 8);
    const auto answer = device_.launch(launch_name, forged, good.reads, good.writes);
    static_cast<void>(answer_of(answer));
  }
  const std::vector<float> ones(n * n, 1);
  EXPECT_TRUE(holds(device_, must(memory.slice(0, n * n)), ones));
  EXPECT_TRUE(holds(device_, must(memory.slice(2 * n * n, n * n)), ones));
  EXPECT_TRUE(holds(device_, a.memory, ones));
}

TEST_F(MatmulRequest, TakesALongListOfMatrices) {
  constexpr std::size_t many = 1000;
  const auto memory = uninitialized(dtype::float32, 2 * many * n);
  must(answer_of(device_.fill(memory, scalar{1.0F})));
  std::vector<blas::matrix> a, b, d;
  for (std::size_t i = 0; i < many; ++i) {
    a.push_back({must(memory.slice(i * n, n)), 1, n});
    b.push_back({must(memory.slice(i * n, n)), n, 1});
    d.push_back({must(memory.slice((many + i) * n, 1)), 1, 1});
  }
  ASSERT_TRUE(is_ok(answer_of(blas::matmul(device_, a, b, d))));
  std::vector<float> want(many * n, 1);
  for (std::size_t i = 0; i < many; ++i)
    want[i * n] = n;
  EXPECT_TRUE(holds(device_, must(memory.slice(many * n, many * n)), want));
}

/// What a product does not write remains as it was: here, without a defined content.
TEST_F(MatmulRequest, WritesOnlyWhatItUses) {
  const auto a = floats(1);
  const auto d = floats(0);
  const std::pair<activation, dtype> all[] = {{activation::relu, dtype::uint8},
                                              {activation::gelu, dtype::float32}};
  for (const auto& [function, type] : all) {
    SCOPED_TRACE(to_string(function));
    const std::size_t used = function == activation::relu ? n * 128 / 8 : n * n;
    const auto auxiliary = uninitialized(type, used + 1);
    const auto sums = uninitialized(dtype::float32, n + 1);
    EXPECT_TRUE(has_code(answer_of(launch_failure(device_, "on purpose", {auxiliary, sums})),
                         errc::launch_failed));
    ASSERT_TRUE(is_ok(
        answer_of(blas::matmul(device_, a, a, d, {.function = function, .auxiliary = auxiliary}))));
    EXPECT_TRUE(is_ok(get(device_, must(auxiliary.slice(0, used)))));
    EXPECT_TRUE(has_code(get(device_, must(auxiliary.slice(used, 1))), errc::indeterminate));
    const auto gradient =
        function == activation::relu ? activation::relu_gradient : activation::gelu_gradient;
    ASSERT_TRUE(is_ok(answer_of(blas::matmul( // reads no more than was written
        device_, a, a, d, {.function = gradient, .auxiliary = auxiliary, .bias_gradient = sums}))));
    EXPECT_TRUE(is_ok(get(device_, must(sums.slice(0, n)))));
    EXPECT_TRUE(has_code(get(device_, must(sums.slice(n, 1))), errc::indeterminate));
  }
}

/// A message is refused where it is made, for the reasons that a device would have.
TEST_F(MatmulRequest, AsAMessageIsChecked) {
  const auto a = floats(1);
  const auto d = floats(0);
  const auto refuses = [&](errc code, const blas::matrix& x, const blas::matrix& to,
                           const matmul_options& what = {}) {
    EXPECT_TRUE(has_code(blas::matmul_message(a, x, to, what), code));
  };
  refuses(errc::shape_mismatch, {a.memory, n / 2, n}, d);
  refuses(errc::out_of_range, {a.memory, n, n, transpose::none, n + 1}, d);
  refuses(errc::invalid_argument, a, a); // in place of a factor
  refuses(errc::invalid_argument, a, d, {.batches = 0});
  refuses(errc::stale_ref, {{}, n, n}, d);
  refuses(errc::stale_ref, a, {{}, n, n});
  refuses(errc::not_supported, filled(dtype::float64, scalar{1.0}), d);
  refuses(errc::invalid_argument, a, d, {.bias = must(d.memory.slice(0, n))});
  EXPECT_TRUE(is_ok(blas::matmul_message(a, a, d, {.beta = 1.0})));
  const auto memory = uninitialized(dtype::float32, 2 * n * n);
  const auto half = [&](std::size_t first) {
    return blas::matrix{must(memory.slice(first, n * n)), n, n};
  };
  EXPECT_TRUE(is_ok(blas::matmul_message(half(0), a, half(n * n))));
  EXPECT_TRUE(has_code(blas::matmul_message(half(0), a, half(n * n - 1)), errc::invalid_argument));
}

/// The bits depend neither on the device, nor on its generation, nor on addresses that are
/// multiples of 16 bytes.
TEST_F(MatmulRequest, WhereDeterministicHasTheSameBitsEverywhere) {
  constexpr std::uint64_t k = 5000; // one that is worth dividing
  std::vector<float> left(n * k), right(k * n);
  std::mt19937 random{3};
  std::uniform_real_distribution<float> any{-1, 1};
  for (auto* x : {&left, &right})
    for (auto& y : *x)
      y = any(random);
  const auto bits = [&](const device& on, std::size_t offset) {
    const auto memory_of = [&](const std::vector<float>& content) {
      const auto all = must(on.allocate<float>(content.size() + offset));
      const auto part = must(all.slice(offset, content.size()));
      must(answer_of(on.upload(part, content)));
      return any_gpu_ref{part};
    };
    const auto d = memory_of(std::vector<float>(n * n));
    must(answer_of(blas::matmul(on, {memory_of(left), n, k}, {memory_of(right), k, n}, {d, n, n},
                                {.deterministic = true})));
    return must(get(on, d));
  };
  const auto first = bits(device_, 0);
  for (const std::size_t offset : {4, 8, 64})
    EXPECT_EQ(bits(device_, offset), first) << offset;
  for (const int ordinal : system_.ordinals())
    EXPECT_EQ(bits(system_.open(ordinal), 0), first) << ordinal;
  must(answer_of(device_.reset()));
  EXPECT_EQ(bits(device_, 0), first);
  if (on_cuda())
    return;
  std::vector<float> want(n * n); // on the host, sums are in order
  for (std::uint64_t i = 0; i < n; ++i)
    for (std::uint64_t p = 0; p < k; ++p)
      for (std::uint64_t j = 0; j < n; ++j)
        want[i * n + j] += left[i * k + p] * right[p * n + j];
  EXPECT_TRUE(std::ranges::equal(first, bytes_of(want)));
}

/// A worker prepares a product once for all values of alpha, and of a beta that is not 0.
TEST_F(MatmulRequest, IsPreparedForAllFactors) {
  const auto library = detail::find_library_launch(launch_name);
  ASSERT_TRUE(library && library->clear_ignored);
  const auto a = floats(1);
  const auto d = floats(0);
  const auto key = [&](const matmul_options& what) {
    auto bytes = must(blas::matmul_message(a, a, d, what)).arguments;
    library->clear_ignored(std::as_writable_bytes(std::span{bytes}));
    return bytes;
  };
  EXPECT_EQ(key({.alpha = 2.0, .beta = 3.0}), key({.alpha = -1.0, .beta = 0.5}));
  EXPECT_NE(key({.beta = 1.0}), key({}));
  EXPECT_NE(key({.deterministic = true}), key({}));
}

/// Scales are for each matrix of the list.
TEST_F(MatmulRequest, ScalesFloat8OfABatchByAddress) {
  const auto one = scalar{float8_e4m3{1.0F}};
  auto b = filled(dtype::float8_e4m3, one);
  b.op = transpose::transposed;
  const std::vector<blas::matrix> a{filled(dtype::float8_e4m3, one),
                                    filled(dtype::float8_e4m3, one)};
  const auto zero = scalar{bfloat16{0.0F}};
  const std::vector<blas::matrix> d{filled(dtype::bfloat16, zero), filled(dtype::bfloat16, zero)};
  const auto scale = uninitialized(dtype::float32, 1);
  must(answer_of(device_.fill(scale, scalar{0.5F})));
  const auto done = answer_of(blas::matmul(device_, a, {b, b}, d, {.a_scale = scale}));
  if (!done) { // cuBLASLt may have no algorithm
    EXPECT_TRUE(on_cuda());
    EXPECT_TRUE(has_code(done, errc::not_supported));
    return;
  }
  for (auto& x : d)
    EXPECT_TRUE(holds(device_, x.memory, std::vector<bfloat16>(n * n, bfloat16{n * 0.5F})));
}

} // namespace

} // namespace troupe::testing
