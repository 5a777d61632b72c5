// The ways to ask for matrix products, and those that are refused.

#include "compute/matmul_fixture.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

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
