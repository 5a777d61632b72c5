/// Every verb of a world, through the facade and as a message, compared with the reference.
#include "support/collective_round.hpp"

#include <caf/all.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

namespace troupe {

namespace {

using testing::all_counts;
using testing::answer_of;
using testing::ask;
using testing::get;
using testing::has_code;
using testing::is_ok;
using testing::must;
using testing::round_of;
using testing::test_system;

class Collectives : public ::testing::TestWithParam<int> {};

TEST_P(Collectives, AreRightForEveryKindAndType) {
  test_system system{{.devices = GetParam()}};
  if (system.devices() < GetParam())
    GTEST_SKIP() << "needs " << GetParam() << " devices";
  auto world = system.open_world({});
  std::uint64_t seed = 0;
  for (auto kind : testing::round_kinds)
    for (auto type : real_dtypes)
      for (std::size_t count : {1, 37}) {
        ++seed;
        round_of round{world,
                       {.what = kind,
                        .type = type,
                        .count = count,
                        .root = static_cast<int>(seed % world.size()),
                        .seed = seed}};
        ASSERT_TRUE(is_ok(answer_of(world.run(round.request()))))
            << to_string(kind) << " of " << to_string(type);
        round.expect_right();
      }
}

TEST_P(Collectives, MoveAndAddComplexNumbers) {
  test_system system{{.devices = GetParam()}};
  if (system.devices() < GetParam())
    GTEST_SKIP() << "needs " << GetParam() << " devices";
  auto world = system.open_world({});
  const auto n = world.size();
  const auto of_rank = [](std::size_t rank, std::size_t count) {
    std::vector<std::complex<double>> result(count);
    for (std::size_t i = 0; i < count; ++i)
      result[i] = {static_cast<double>(rank * 100 + i), static_cast<double>(2 * i + 1)};
    return result;
  };
  std::vector<std::complex<double>> sum(7);
  std::vector<std::complex<double>> all;
  std::vector<any_gpu_ref> x;
  const auto gathered = must(world.allocate<std::complex<double>>(7 * n));
  const auto devices = testing::devices_of(world);
  for (std::size_t r = 0; r < n; ++r) {
    const auto mine = of_rank(r, 7);
    std::ranges::transform(sum, mine, sum.begin(), std::plus{});
    all.insert(all.end(), mine.begin(), mine.end());
    x.push_back(must(devices[r].allocate<std::complex<double>>(7)));
    testing::put(devices[r], x[r], testing::bytes_of(mine));
  }
  ASSERT_TRUE(is_ok(answer_of(world.all_gather(x, gathered))));
  ASSERT_TRUE(is_ok(answer_of(world.all_reduce(x))));
  for (std::size_t r = 0; r < n; ++r) {
    EXPECT_TRUE(testing::holds(devices[r], gathered[r], all));
    EXPECT_TRUE(testing::holds(devices[r], x[r], sum));
  }
  const auto halved =
      world.run(all_reduce{x, x, reduce_op::premul_sum, {}, std::vector<double>(n, 0.5)});
  ASSERT_TRUE(is_ok(answer_of(halved)));
  for (auto& number : sum)
    number *= 0.5 * static_cast<double>(n);
  EXPECT_TRUE(testing::holds(devices[0], x[0], sum));
  for (const auto op : {reduce_op::prod, reduce_op::min, reduce_op::max})
    EXPECT_TRUE(has_code(answer_of(world.all_reduce(x, op)), errc::invalid_argument));
}

INSTANTIATE_TEST_SUITE_P(Ranks, Collectives, ::testing::Values(1, 2, 3, 4, 8));

class Verbs : public ::testing::Test {
protected:
  round_of round(collective_kind kind, int root = 0) const {
    return {under_test, {.what = kind, .type = dtype::int32, .count = 16, .root = root, .seed = 7}};
  }
  int last() const { return static_cast<int>(under_test.size()) - 1; }

  test_system system{{.devices = 3}};
  world under_test = system.open_world({});
};

TEST_F(Verbs, OfTheFacade) {
  auto check = [&](const round_of& x, const pending<collective_done>& answer) {
    EXPECT_TRUE(is_ok(answer_of(answer)));
    x.expect_right();
  };
  auto& w = under_test;
  auto root = static_cast<std::size_t>(last());
  auto a = round(collective_kind::all_reduce);
  check(a, w.all_reduce(a.send(), a.recv()));
  auto b = round(collective_kind::reduce, last());
  check(b, w.reduce(b.send(), b.recv()[root], last()));
  auto c = round(collective_kind::broadcast, last());
  check(c, w.broadcast(c.send()[root], c.recv(), last()));
  auto d = round(collective_kind::all_gather);
  check(d, w.all_gather(d.send(), d.recv()));
  auto e = round(collective_kind::reduce_scatter);
  check(e, w.reduce_scatter(e.send(), e.recv()));
  auto f = round(collective_kind::all_to_all);
  check(f, w.all_to_all(f.send(), f.recv()));
  auto g = round(collective_kind::all_to_all_v);
  check(g, w.all_to_all_v(g.send(), g.recv(), all_counts(w.size())));
  auto h = round(collective_kind::gather, last());
  check(h, w.gather(h.send(), h.recv()[root], last()));
  auto i = round(collective_kind::scatter, last());
  check(i, w.scatter(i.send()[root], i.recv(), last()));
  EXPECT_TRUE(is_ok(answer_of(w.barrier())));
}

TEST_F(Verbs, AsMessages) {
  auto check = [&](const round_of& x, auto message) {
    EXPECT_TRUE(is_ok(ask<collective_done>(system, under_test.actor(), std::move(message))));
    x.expect_right();
  };
  auto root = static_cast<std::size_t>(last());
  auto b = round(collective_kind::reduce, last());
  check(b, reduce{b.send(), b.recv()[root], last(), reduce_op::sum, {}, {}});
  auto c = round(collective_kind::broadcast, last());
  check(c, broadcast{c.send()[root], c.recv(), last(), {}});
  auto d = round(collective_kind::all_gather);
  check(d, all_gather{d.send(), d.recv(), {}});
  auto e = round(collective_kind::reduce_scatter);
  check(e, reduce_scatter{e.send(), e.recv(), reduce_op::sum, {}, {}});
  auto f = round(collective_kind::all_to_all);
  check(f, all_to_all{f.send(), f.recv(), {}});
  auto g = round(collective_kind::all_to_all_v);
  check(g, all_to_all_v{g.send(), g.recv(), all_counts(under_test.size()), {}});
  auto h = round(collective_kind::gather, last());
  check(h, gather{h.send(), h.recv()[root], last(), {}});
  auto i = round(collective_kind::scatter, last());
  check(i, scatter{i.send()[root], i.recv(), last(), {}});
  EXPECT_TRUE(is_ok(ask<collective_done>(system, under_test.actor(), barrier{})));
}

// Sends from each rank to the next and an all-reduce, as one group.
TEST_F(Verbs, InAGroup) {
  auto n = under_test.size();
  auto sum = round(collective_kind::all_reduce);
  std::vector<gpu_ref<std::int32_t>> from;
  std::vector<gpu_ref<std::int32_t>> to;
  group all;
  for (std::size_t rank = 0; rank < n; ++rank) {
    auto device = under_test.device_of(rank);
    from.push_back(must(device.allocate<std::int32_t>(4)));
    to.push_back(must(device.allocate<std::int32_t>(4)));
    must(answer_of(device.fill(from.back(), static_cast<std::int32_t>(10 + rank))));
    must(answer_of(device.fill(to.back(), -1)));
  }
  for (std::size_t rank = 0; rank < n; ++rank)
    all.calls.push_back(send_recv{static_cast<int>(rank),
                                  static_cast<int>((rank + 1) % n),
                                  from[rank],
                                  to[(rank + 1) % n],
                                  {}});
  all.calls.push_back(sum.request());
  EXPECT_TRUE(is_ok(answer_of(under_test.run(all))));
  sum.expect_right();
  for (std::size_t rank = 0; rank < n; ++rank) {
    auto bytes = must(get(under_test.device_of(rank), to[rank]));
    std::int32_t first = 0;
    std::memcpy(&first, bytes.data(), sizeof first);
    EXPECT_EQ(first, static_cast<std::int32_t>(10 + (rank + n - 1) % n));
  }
  all.calls.push_back(sum.request()); // two calls of the group write the same memory
  EXPECT_TRUE(has_code(answer_of(under_test.run(all)), errc::invalid_argument));
  EXPECT_TRUE(is_ok(answer_of(under_test.run(group{}))));
}

TEST_F(Verbs, WithFactors) {
  auto n = under_test.size();
  auto refs = must(under_test.allocate<float>(8));
  std::vector<double> factors;
  double want = 0;
  for (std::size_t rank = 0; rank < n; ++rank) {
    factors.push_back(0.5 * static_cast<double>(rank + 1));
    want += factors.back() * static_cast<double>(rank + 2);
    must(answer_of(under_test.device_of(rank).fill(refs[rank], static_cast<float>(rank + 2))));
  }
  const all_reduce x{any(refs), {}, reduce_op::premul_sum, {}, factors};
  EXPECT_TRUE(is_ok(answer_of(under_test.run(x))));
  auto bytes = must(get(under_test.device_of(0), refs[0]));
  float got = 0;
  std::memcpy(&got, bytes.data(), sizeof got);
  EXPECT_EQ(got, static_cast<float>(want));
  auto less = x;
  less.factors.pop_back();
  EXPECT_TRUE(has_code(answer_of(under_test.run(less)), errc::invalid_argument));
  EXPECT_TRUE(has_code(answer_of(under_test.all_reduce(refs, reduce_op::premul_sum)),
                       errc::invalid_argument));
}

TEST_F(Verbs, RefuseWhatCannotBeRight) {
  auto refused = [&](const collective& x) {
    return code_of(testing::error_of(answer_of(under_test.run(x))));
  };
  auto bad_root = round(collective_kind::broadcast).request();
  bad_root.peer = 17;
  EXPECT_EQ(refused(bad_root), errc::invalid_argument);
  auto short_recv = round(collective_kind::all_gather).request();
  short_recv.recv[0] = must(short_recv.recv[0].slice(0, 3));
  EXPECT_EQ(refused(short_recv), errc::shape_mismatch);
  auto uneven = round(collective_kind::all_to_all).request();
  if (under_test.size() > 1) {
    uneven.send[0] = must(uneven.send[0].slice(0, uneven.send[0].count() - 1));
    EXPECT_EQ(refused(uneven), errc::shape_mismatch);
  }
  auto no_memory = round(collective_kind::scatter).request();
  no_memory.recv[0] = any_gpu_ref{};
  EXPECT_EQ(refused(no_memory), errc::stale_ref);
  auto counts = round(collective_kind::all_to_all_v).request();
  counts.counts.pop_back();
  EXPECT_EQ(refused(counts), errc::invalid_argument);
  auto one_end = round(collective_kind::all_reduce).request();
  one_end.kind = collective_kind::recv;
  EXPECT_EQ(refused(one_end), errc::invalid_argument);
  EXPECT_TRUE(testing::works(under_test));
}

} // namespace

} // namespace troupe
