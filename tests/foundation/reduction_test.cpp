#include "foundation/reduction.hpp"
#include "support/reference.hpp"
#include <troupe/dtype.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using namespace troupe;
namespace reference = troupe::testing;
using reference::input_kind;

using bytes = std::vector<std::byte>;

constexpr std::size_t counts[] = {0, 1, 3, 256, 257, 1030};

std::vector<const void*> read_pointers(const std::vector<bytes>& xs) {
  std::vector<const void*> r(xs.size());
  std::ranges::transform(xs, r.begin(), [](const bytes& x) { return x.data(); });
  return r;
}

std::vector<void*> write_pointers(std::vector<bytes>& xs) {
  std::vector<void*> r(xs.size());
  std::ranges::transform(xs, r.begin(), [](bytes& x) { return x.data(); });
  return r;
}

/// Returns pointers to each rank's element in `factors`.
std::vector<const void*> pointers_to_factors(dtype type, const bytes& factors) {
  std::vector<const void*> r;
  for (std::size_t at = 0; at < factors.size(); at += size_of(type))
    r.push_back(factors.data() + at);
  return r;
}

std::vector<std::span<const std::byte>> views_of(const std::vector<bytes>& xs) {
  return {xs.begin(), xs.end()};
}

std::string name_of(dtype type, reduce_op op) {
  std::string r{to_string(type)};
  r += to_string(op);
  std::erase(r, '_');
  return r;
}

using parameters = std::tuple<dtype, reduce_op>;

std::string name_of_case(const ::testing::TestParamInfo<parameters>& x) {
  return name_of(std::get<0>(x.param), std::get<1>(x.param));
}

class Reduction : public ::testing::TestWithParam<parameters> {
protected:
  dtype type = std::get<0>(GetParam());
  reduce_op op = std::get<1>(GetParam());

  std::vector<bytes> inputs(int ranks, input_kind kind, std::size_t count) const {
    return reference::random_inputs(
        {.type = type, .op = op, .seed = 7 * count, .ranks = ranks, .kind = kind}, count);
  }

  void expect_right(const std::vector<bytes>& in, const bytes& out, input_kind kind) const {
    const auto result = reference::check(type, op, in, out, kind);
    EXPECT_TRUE(result) << to_string(result) << "; ranks: " << in.size();
    EXPECT_EQ(result.undetermined, 0u) << "; ranks: " << in.size();
  }
};

INSTANTIATE_TEST_SUITE_P(All, Reduction,
                         ::testing::Combine(::testing::ValuesIn(real_dtypes),
                                            ::testing::ValuesIn(all_reduce_ops)),
                         name_of_case);

TEST_P(Reduction, WritesEveryOutputAndNothingElse) {
  constexpr std::size_t guard = 64;
  for (const input_kind kind : {input_kind::any, input_kind::exact})
    for (int ranks = 1; ranks <= 8; ++ranks)
      for (const std::size_t count : counts) {
        const auto in = inputs(ranks, kind, count);
        const std::size_t size = count * size_of(type);
        std::vector<bytes> outs(2, bytes(size + guard));
        for (bytes& out : outs)
          reference::poison(out);
        detail::reduce(type, op, read_pointers(in), write_pointers(outs), count);
        for (bytes& out : outs) {
          EXPECT_TRUE(std::all_of(out.begin() + static_cast<std::ptrdiff_t>(size), out.end(),
                                  [](std::byte x) { return x == std::byte{0xff}; }));
          out.resize(size);
          expect_right(in, out, kind);
        }
      }
}

TEST_P(Reduction, WorksInPlaceOverManyBlocks) {
  constexpr std::size_t count = 20'011;
  for (const input_kind kind : {input_kind::any, input_kind::exact}) {
    const auto in = inputs(3, kind, count);
    auto data = in;
    detail::reduce(type, op, read_pointers(data), write_pointers(data), count);
    for (const bytes& out : data)
      expect_right(in, out, kind);
  }
}

TEST_P(Reduction, TakesManyRanks) {
  for (const int ranks : {9, 16, 33, 64}) {
    const auto in = inputs(ranks, input_kind::exact, 300);
    std::vector<bytes> out(1, bytes(in[0].size()));
    reference::poison(out[0]);
    detail::reduce(type, op, read_pointers(in), write_pointers(out), 300);
    expect_right(in, out[0], input_kind::exact);
  }
}

TEST_P(Reduction, IsMadeOfItsSteps) {
  for (const std::size_t count : counts) {
    constexpr int ranks = 5;
    const auto in = inputs(ranks, input_kind::any, count);
    auto data = in;
    if (op == reduce_op::avg)
      for (bytes& x : data)
        detail::begin_average(type, x.data(), count, ranks);
    for (std::size_t rank = 1; rank < data.size(); ++rank)
      detail::reduce_into(type, op, data[0].data(), data[rank].data(), count);
    if (op == reduce_op::avg)
      detail::finish_average(type, data[0].data(), count, ranks);
    expect_right(in, data[0], input_kind::any);

    std::vector<bytes> out(1, bytes(in[0].size()));
    detail::reduce(type, op, read_pointers(in), write_pointers(out), count);
    const auto same = reference::check_equal(type, data[0], out[0]);
    EXPECT_TRUE(same) << to_string(same);
  }
}

class PremulSum : public ::testing::TestWithParam<dtype> {
protected:
  struct ranks_data {
    std::vector<bytes> in;
    bytes factors;
  };

  dtype type = GetParam();

  ranks_data inputs(int ranks, input_kind kind, std::size_t count) const {
    const reference::input_spec spec{.type = type,
                                     .op = reduce_op::premul_sum,
                                     .seed = 5 * count + 1,
                                     .ranks = ranks,
                                     .kind = kind};
    return {reference::random_inputs(spec, count), reference::random_factors(spec)};
  }

  void expect_right(const ranks_data& x, const bytes& out, input_kind kind) const {
    const auto result = reference::check_premul_sum(type, views_of(x.in), x.factors, out, kind);
    EXPECT_TRUE(result) << to_string(result) << "; ranks: " << x.in.size();
    EXPECT_EQ(result.undetermined, 0u) << "; ranks: " << x.in.size();
  }

  void reduce(const std::vector<bytes>& in, const bytes& factors, std::vector<bytes>& outs) const {
    detail::reduce(type, reduce_op::premul_sum, read_pointers(in), write_pointers(outs),
                   in[0].size() / size_of(type), pointers_to_factors(type, factors));
  }
};

INSTANTIATE_TEST_SUITE_P(All, PremulSum, ::testing::ValuesIn(real_dtypes),
                         [](const auto& x) { return name_of(x.param, reduce_op::premul_sum); });

TEST_P(PremulSum, TakesEachRankTimesItsFactor) {
  for (const input_kind kind : {input_kind::any, input_kind::exact})
    for (int ranks = 1; ranks <= 8; ++ranks)
      for (const std::size_t count : counts) {
        const auto x = inputs(ranks, kind, count);
        std::vector<bytes> outs(2, bytes(x.in[0].size()));
        for (bytes& out : outs)
          reference::poison(out);
        reduce(x.in, x.factors, outs);
        for (const bytes& out : outs)
          expect_right(x, out, kind);
      }
}

TEST_P(PremulSum, WorksInPlaceOverManyBlocks) {
  for (const input_kind kind : {input_kind::any, input_kind::exact}) {
    const auto x = inputs(3, kind, 20'011);
    auto data = x.in;
    reduce(data, x.factors, data);
    for (const bytes& out : data)
      expect_right(x, out, kind);
  }
}

TEST_P(PremulSum, IsMadeOfItsSteps) {
  for (const std::size_t count : counts) {
    const auto x = inputs(5, input_kind::any, count);
    auto data = x.in;
    for (std::size_t rank = 0; rank < data.size(); ++rank)
      detail::scale(type, data[rank].data(), count, x.factors.data() + rank * size_of(type));
    for (std::size_t rank = 1; rank < data.size(); ++rank)
      detail::reduce_into(type, reduce_op::premul_sum, data[0].data(), data[rank].data(), count);
    std::vector<bytes> out(1, bytes(x.in[0].size()));
    reduce(x.in, x.factors, out);
    const auto same = reference::check_equal(type, data[0], out[0]);
    EXPECT_TRUE(same) << to_string(same);
  }
}

TEST_P(PremulSum, ItsReferenceFindsAWrongElementAndALostFactor) {
  constexpr std::size_t count = 500;
  const std::size_t size = size_of(type);
  for (const int ranks : {1, 2, 5, 8}) {
    const auto x = inputs(ranks, input_kind::exact, count);
    std::vector<bytes> out(1, bytes(x.in[0].size()));
    reduce(x.in, x.factors, out);
    bytes damaged = out[0];
    damaged[57 * size] ^= std::byte{1};
    const auto result =
        reference::check_premul_sum(type, views_of(x.in), x.factors, damaged, input_kind::exact);
    EXPECT_EQ(result.wrong, 1u);
    EXPECT_EQ(result.first, 57u);
    auto other = x.factors; // half or double the correct factor, or its negative
    other[other.size() - 1] ^= std::byte{0x80};
    reduce(x.in, other, out);
    EXPECT_GT(
        reference::check_premul_sum(type, views_of(x.in), x.factors, out[0], input_kind::exact)
            .wrong,
        count / 20)
        << "ranks: " << ranks;
  }
}

TEST(ScaleOfIntegers, Wraps) {
  const auto scaled = []<class T>(T x, T factor) {
    detail::scale(dtype_v<T>, &x, 1, &factor);
    return x;
  };
  EXPECT_EQ(scaled(std::int8_t{100}, std::int8_t{3}), 44);
  EXPECT_EQ(scaled(std::int8_t{-128}, std::int8_t{-1}), -128);
  EXPECT_EQ(scaled(std::uint8_t{16}, std::uint8_t{17}), 16);
  EXPECT_EQ(scaled(std::int32_t{0x10001}, std::int32_t{0x10001}), 0x20001);
  EXPECT_EQ(scaled(std::int64_t{-3}, std::int64_t{7}), -21);
  EXPECT_EQ(scaled(~std::uint64_t{0}, std::uint64_t{2}), ~std::uint64_t{0} - 1);
}

TEST(ScaleOfFloats, RoundsToTheTypeAndTakesAFactorWhereverItLies) {
  std::array<std::byte, 3> memory{};
  const float16 factor{1.5f};
  std::memcpy(memory.data() + 1, &factor, sizeof factor);
  std::array<float16, 3> data{float16{2049}, float16{-60000}, float16::from_bits(1)};
  detail::scale(dtype::float16, data.data(), data.size(), memory.data() + 1);
  EXPECT_EQ(static_cast<float>(data[0]), 3072); // 2048 * 1.5: 2049 is not representable
  EXPECT_EQ(static_cast<float>(data[1]), -std::numeric_limits<float>::infinity());
  EXPECT_EQ(data[2].bits, 2); // 1.5 times the smallest number: ties to even
}

template <class T> T reduced(reduce_op op, const std::vector<T>& xs) {
  std::vector<const void*> in(xs.size());
  std::ranges::transform(xs, in.begin(), [](const T& x) { return &x; });
  alignas(T) std::array<std::byte, sizeof(T)> out;
  reference::poison(out);
  void* to = out.data();
  detail::reduce(dtype_v<T>, op, in, {&to, 1}, 1);
  return std::bit_cast<T>(out);
}

TEST(ReductionOfIntegers, Wraps) {
  using i64 = std::int64_t;
  constexpr i64 most = std::numeric_limits<i64>::max();
  constexpr i64 least = std::numeric_limits<i64>::min();
  EXPECT_EQ(reduced<std::int8_t>(reduce_op::sum, {127, 1}), -128);
  EXPECT_EQ(reduced<std::uint8_t>(reduce_op::sum, {200, 100}), 44);
  EXPECT_EQ(reduced<std::int8_t>(reduce_op::prod, {-128, -1}), -128);
  EXPECT_EQ(reduced<std::uint8_t>(reduce_op::prod, {255, 255}), 1);
  EXPECT_EQ(reduced<std::int32_t>(reduce_op::sum, {0x7fffffff, 2}), -0x7fffffff);
  EXPECT_EQ(reduced<std::int32_t>(reduce_op::prod, {0x10001, 0x10001}), 0x20001);
  EXPECT_EQ(reduced<std::uint32_t>(reduce_op::prod, {0xffffffff, 0xffffffff}), 1u);
  EXPECT_EQ(reduced<i64>(reduce_op::sum, {least, -1}), most);
  EXPECT_EQ(reduced<i64>(reduce_op::prod, {most, 2}), -2);
  EXPECT_EQ(reduced<std::uint64_t>(reduce_op::sum, {~0ull, 3}), 2u);
}

TEST(ReductionOfIntegers, AverageDividesTheWrappedSumTowardZero) {
  EXPECT_EQ(reduced<std::int8_t>(reduce_op::avg, {-3, 0}), -1);
  EXPECT_EQ(reduced<std::int8_t>(reduce_op::avg, {3, 0}), 1);
  EXPECT_EQ(reduced<std::int8_t>(reduce_op::avg, {100, 100}), -28);
  EXPECT_EQ(reduced<std::uint8_t>(reduce_op::avg, {200, 100}), 22);
  EXPECT_EQ(reduced<std::int8_t>(reduce_op::avg, {-128}), -128);
  EXPECT_EQ(reduced<std::int32_t>(reduce_op::avg, {-7, 0, 0}), -2);
  EXPECT_EQ(reduced<std::uint32_t>(reduce_op::avg, {0xffffffff, 0, 0}), 0x55555555u);
  EXPECT_EQ(reduced<std::int64_t>(reduce_op::avg, {std::numeric_limits<std::int64_t>::min(), 0}),
            std::numeric_limits<std::int64_t>::min() / 2);
  EXPECT_EQ(reduced<std::uint64_t>(reduce_op::avg, {~0ull, 0}), ~0ull / 2);
}

TEST(ReductionOfIntegers, ComparesWithSign) {
  EXPECT_EQ(reduced<std::int8_t>(reduce_op::max, {-1, 1}), 1);
  EXPECT_EQ(reduced<std::uint8_t>(reduce_op::max, {255, 1}), 255);
  EXPECT_EQ(reduced<std::int64_t>(reduce_op::min, {1, -1}), -1);
  EXPECT_EQ(reduced<std::uint64_t>(reduce_op::min, {1, ~0ull}), 1u);
}

template <class T> class ReductionOfFloats : public ::testing::Test {
protected:
  using number = std::conditional_t<std::is_same_v<T, double>, double, float>;

  static number reduced(reduce_op op, std::initializer_list<number> xs) {
    std::vector<T> in(xs.size());
    std::ranges::transform(xs, in.begin(), [](number x) { return T{x}; });
    return static_cast<number>(::reduced<T>(op, in));
  }

  static constexpr number not_a_number = std::numeric_limits<number>::quiet_NaN();
};

using float_types = ::testing::Types<float16, bfloat16, float, double, float8_e4m3, float8_e5m2>;
TYPED_TEST_SUITE(ReductionOfFloats, float_types);

TYPED_TEST(ReductionOfFloats, MinAndMaxLeaveNansOut) {
  const auto nan = this->not_a_number;
  for (const reduce_op op : {reduce_op::min, reduce_op::max}) {
    EXPECT_EQ(this->reduced(op, {nan, 2}), 2);
    EXPECT_EQ(this->reduced(op, {-2, nan}), -2);
    EXPECT_EQ(this->reduced(op, {nan, 3, nan}), 3);
    EXPECT_TRUE(std::isnan(this->reduced(op, {nan, nan})));
  }
}

TYPED_TEST(ReductionOfFloats, MinAndMaxOrderZeros) {
  for (const auto& zeros :
       {std::initializer_list<typename TestFixture::number>{-0.0f, 0.0f}, {0.0f, -0.0f}}) {
    EXPECT_TRUE(std::signbit(this->reduced(reduce_op::min, zeros)));
    EXPECT_FALSE(std::signbit(this->reduced(reduce_op::max, zeros)));
  }
}

TYPED_TEST(ReductionOfFloats, SumsCarryNans) {
  const auto nan = this->not_a_number;
  for (const reduce_op op : {reduce_op::sum, reduce_op::prod, reduce_op::avg}) {
    EXPECT_TRUE(std::isnan(this->reduced(op, {nan, 1, 1})));
    EXPECT_TRUE(std::isnan(this->reduced(op, {1, 1, nan})));
  }
}

TYPED_TEST(ReductionOfFloats, AverageOfTheLargestDoesNotOverflow) {
  typename TestFixture::number largest = 1;
  while (std::isfinite(2 * largest) &&
         this->reduced(reduce_op::sum, {largest, largest}) == 2 * largest)
    largest *= 2;
  EXPECT_EQ(this->reduced(reduce_op::avg, {largest, largest}), largest);
  EXPECT_EQ(this->reduced(reduce_op::avg, {largest, largest, largest, largest}), largest);
}

TEST(ReductionOfNarrowFloats, Overflows) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  const auto sum = []<class T>(T x, T y) {
    return static_cast<float>(reduced<T>(reduce_op::sum, {x, y}));
  };
  EXPECT_EQ(sum(float16{65504}, float16{65504}), infinity);
  EXPECT_EQ(sum(float16{-65504}, float16{-65504}), -infinity);
  EXPECT_EQ(sum(bfloat16::from_bits(0x7f7f), bfloat16::from_bits(0x7f7f)), infinity);
  EXPECT_EQ(sum(float8_e4m3{448}, float8_e4m3{448}), 448);
  EXPECT_EQ(sum(float8_e4m3{-448}, float8_e4m3{-448}), -448);
  EXPECT_EQ(sum(float8_e5m2{57344}, float8_e5m2{57344}), 57344);
}

TEST(ReductionOfNarrowFloats, RoundsEveryStepToEven) {
  const auto sum = [](std::initializer_list<float> xs) {
    std::vector<float16> in(xs.size());
    std::ranges::transform(xs, in.begin(), [](float x) { return float16{x}; });
    return static_cast<float>(reduced<float16>(reduce_op::sum, in));
  };
  EXPECT_EQ(sum({2048, 1}), 2048);
  EXPECT_EQ(sum({2050, 1}), 2052);
  EXPECT_EQ(sum({2048, 1, 1}), 2048);
  EXPECT_EQ(sum({1, 1, 2048}), 2050);
}

class Reference : public Reduction {};

INSTANTIATE_TEST_SUITE_P(All, Reference,
                         ::testing::Combine(::testing::ValuesIn(real_dtypes),
                                            ::testing::ValuesIn(all_reduce_ops)),
                         name_of_case);

TEST_P(Reference, FindsAWrongElement) {
  constexpr std::size_t count = 100;
  const std::size_t size = size_of(type);
  for (const int ranks : {1, 2, 4}) {
    const auto in = inputs(ranks, input_kind::exact, count);
    std::vector<bytes> out(1, bytes(in[0].size()));
    detail::reduce(type, op, read_pointers(in), write_pointers(out), count);
    for (const std::size_t index : {std::size_t{0}, std::size_t{57}, count - 1}) {
      bytes damaged = out[0];
      std::byte& last_bits = damaged[index * size];
      last_bits ^= std::byte{1};
      const auto result = reference::check(type, op, in, damaged, input_kind::exact);
      EXPECT_EQ(result.wrong, 1u);
      EXPECT_EQ(result.first, index);
    }
    bytes untouched(in[0].size());
    reference::poison(untouched);
    EXPECT_GT(reference::check(type, op, in, untouched, input_kind::exact).wrong, count / 2);
    EXPECT_FALSE(reference::check(type, op, in, std::span{out[0]}.first(size * (count - 1))));
  }
}

TEST_P(Reference, FindsALostRank) {
  constexpr std::size_t count = 1000;
  for (const int ranks : {2, 4, 8}) {
    const auto in = inputs(ranks, input_kind::exact, count);
    auto doubled = in;
    doubled.back() = doubled.front();
    std::vector<bytes> out(1, bytes(in[0].size()));
    detail::reduce(type, op, read_pointers(doubled), write_pointers(out), count);
    const auto result = reference::check(type, op, in, out[0], input_kind::exact);
    EXPECT_GT(result.wrong, count / 20) << "ranks: " << ranks;
    EXPECT_EQ(result.undetermined, 0u);
  }
}

TEST_P(Reference, AcceptsEveryOrder) {
  constexpr std::size_t count = 500;
  std::mt19937 random{11};
  for (const input_kind kind : {input_kind::any, input_kind::exact})
    for (const int ranks : {2, 3, 4, 7, 8}) {
      const auto in = inputs(ranks, kind, count);
      for (int order = 0; order < 5; ++order) {
        // Combines any two partial results until one is left.
        auto parts = in;
        if (op == reduce_op::avg)
          for (bytes& x : parts)
            detail::begin_average(type, x.data(), count, ranks);
        while (parts.size() > 1) {
          std::ranges::shuffle(parts, random);
          const bytes last = std::move(parts.back());
          parts.pop_back();
          detail::reduce_into(type, op, parts.back().data(), last.data(), count);
        }
        if (op == reduce_op::avg)
          detail::finish_average(type, parts[0].data(), count, ranks);
        expect_right(in, parts[0], kind);
      }
    }
}

TEST_P(Reference, InputsFollowFromTheSeed) {
  constexpr std::size_t count = 100;
  const auto in = inputs(3, input_kind::any, count);
  EXPECT_EQ(in, inputs(3, input_kind::any, count));
  EXPECT_NE(in[0], in[1]);
  EXPECT_NE(in, reference::random_inputs({.type = type, .op = op, .seed = 99, .ranks = 3}, count));
}

TEST(ReferenceOfCopies, ComparesBits) {
  const bytes want(16, std::byte{0xff}); // NaNs
  bytes got = want;
  EXPECT_TRUE(reference::check_equal(dtype::float32, want, got));
  got[9] = std::byte{0};
  const auto result = reference::check_equal(dtype::float32, want, got);
  EXPECT_EQ(result.wrong, 1u);
  EXPECT_EQ(result.first, 2u);
  EXPECT_NE(to_string(result).find("index 2"), std::string::npos) << to_string(result);
  EXPECT_FALSE(reference::check_equal(dtype::float32, want, std::span{got}.first(8)));
}

TEST(ReferenceOfSums, SaysWhereTheOrderDecides) {
  const auto one = [](float x) {
    const float16 y{x};
    bytes r(sizeof y);
    std::memcpy(r.data(), &y, sizeof y);
    return r;
  };
  // (60000 + 60000) - 60000 overflows to infinity; 60000 + (60000 - 60000) does not.
  const std::vector<bytes> in{one(60000), one(60000), one(-60000)};
  const auto result = reference::check(dtype::float16, reduce_op::sum, in, one(0));
  EXPECT_EQ(result.undetermined, 1u);
  EXPECT_EQ(result.wrong, 0u);
}

// -- the reference for collectives, checked with examples by hand

using ints = std::vector<std::int32_t>;

bytes bytes_of(const ints& xs) {
  bytes r(xs.size() * sizeof(std::int32_t));
  if (!xs.empty())
    std::memcpy(r.data(), xs.data(), r.size());
  return r;
}

struct collective_example {
  reference::collective_spec spec;
  std::vector<ints> send;
  std::vector<ints> recv; ///< expected content; -1 before
};

std::vector<collective_example> collective_examples() {
  using enum collective_kind;
  const auto of = [](collective_kind what, std::size_t count, int root) {
    return reference::collective_spec{
        .what = what, .type = dtype::int32, .count = count, .ranks = 3, .root = root};
  };
  auto exchange = of(all_to_all_v, 2, 0);
  exchange.plans = {{{0, 1, 2}, {0, 3, 0}, {0, 2, 0}, {0, 1, 0}},
                    {{2, 0, 0}, {0, 0, 0}, {1, 0, 1}, {0, 0, 2}},
                    {{0, 1, 1}, {0, 1, 0}, {2, 0, 1}, {1, 0, 0}}};
  auto scaled = of(all_reduce, 2, 0);
  scaled.op = reduce_op::premul_sum;
  scaled.factors = bytes_of({1, 10, -1});
  return {
      {of(all_reduce, 2, 0), {{1, 2}, {10, 20}, {100, 200}}, {{111, 222}, {111, 222}, {111, 222}}},
      {scaled, {{1, 2}, {10, 20}, {100, 200}}, {{1, 2}, {1, 2}, {1, 2}}},
      {of(reduce, 1, 1), {{1}, {2}, {3}}, {{-1}, {6}, {-1}}},
      {of(broadcast, 2, 2), {{}, {}, {7, 8}}, {{7, 8}, {7, 8}, {7, 8, -1}}},
      {of(all_gather, 1, 0), {{1}, {2}, {3}}, {{1, 2, 3}, {1, 2, 3}, {1, 2, 3}}},
      {of(gather, 1, 1), {{1}, {2}, {3}}, {{-1}, {1, 2, 3}, {-1, -1}}},
      {of(scatter, 2, 0), {{1, 2, 3, 4, 5, 6}, {}, {}}, {{1, 2}, {3, 4}, {5, 6, -1}}},
      {of(reduce_scatter, 1, 0), {{1, 2, 3}, {10, 20, 30}, {4, 5, 6}}, {{15}, {27}, {39}}},
      {of(all_to_all, 1, 0), {{1, 2, 3}, {4, 5, 6}, {7, 8, 9}}, {{1, 4, 7}, {2, 5, 8}, {3, 6, 9}}},
      {exchange, {{1, 2, 3, 4}, {5, 6}, {7, 8}}, {{-1, 5, 6}, {4, -1, 8}, {7, 1, 2, -1}}},
      {of(barrier, 5, 0), {{}, {}, {}}, {{}, {-1}, {}}},
  };
}

TEST(ReferenceOfCollectives, KnowsTheExamples) {
  for (const auto& [spec, send, recv] : collective_examples()) {
    SCOPED_TRACE(to_string(spec.what));
    std::vector<bytes> sends;
    for (const ints& x : send)
      sends.push_back(bytes_of(x));
    for (int rank = 0; rank < 3; ++rank) {
      const auto r = static_cast<std::size_t>(rank);
      EXPECT_EQ(reference::send_count(spec, rank), send[r].size());
      EXPECT_LE(reference::recv_count(spec, rank), recv[r].size());
      const bytes before = bytes_of(ints(recv[r].size(), -1));
      const auto result = reference::check_collective(spec, rank, sends, before, bytes_of(recv[r]));
      EXPECT_TRUE(result) << "rank " << rank << ": " << to_string(result);
      for (std::size_t i = 0; i < recv[r].size(); ++i) {
        ints damaged = recv[r];
        damaged[i] ^= 1;
        const auto found =
            reference::check_collective(spec, rank, sends, before, bytes_of(damaged));
        EXPECT_EQ(found.wrong, 1u) << "rank " << rank << ", index " << i;
        EXPECT_EQ(found.first, i) << "rank " << rank;
      }
    }
  }
}

TEST(ReferenceOfCollectives, CompletesPlansThatFitTogether) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const auto x = reference::completed({.what = collective_kind::all_to_all_v,
                                         .type = dtype::int32,
                                         .count = 5,
                                         .ranks = 4,
                                         .seed = seed});
    for (std::size_t r = 0; r < 4; ++r) {
      std::vector<bool> written(reference::recv_count(x, static_cast<int>(r)));
      for (std::size_t q = 0; q < 4; ++q) {
        EXPECT_EQ(x.plans[r].recv_counts[q], x.plans[q].send_counts[r]);
        for (std::size_t i = 0; i < x.plans[r].recv_counts[q]; ++i) {
          const auto at = x.plans[r].recv_offsets[q] + i;
          ASSERT_LT(at, written.size());
          EXPECT_FALSE(written[at]) << "two parts overlap";
          written[at] = true;
        }
      }
    }
  }
}

} // namespace
