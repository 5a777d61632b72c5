#include "core/reduction.hpp"
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
                         ::testing::Combine(::testing::ValuesIn(all_dtypes),
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
                         ::testing::Combine(::testing::ValuesIn(all_dtypes),
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
        // Joins any two partial results until one is left.
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
  // (60000 + 60000) - 60000 is infinite, 60000 + (60000 - 60000) is not.
  const std::vector<bytes> in{one(60000), one(60000), one(-60000)};
  const auto result = reference::check(dtype::float16, reduce_op::sum, in, one(0));
  EXPECT_EQ(result.undetermined, 1u);
  EXPECT_EQ(result.wrong, 0u);
}

} // namespace
