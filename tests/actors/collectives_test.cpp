/// Every verb of a world, through the facade and as a message, against the reference.
#include "support/world_fixture.hpp"

#include <caf/all.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace troupe {

namespace {

using testing::answer_of;
using testing::ask;
using testing::collective_spec;
using testing::get;
using testing::has_code;
using testing::is_ok;
using testing::must;
using testing::put;
using testing::test_system;

constexpr collective_kind kinds[] = {
    collective_kind::all_reduce,   collective_kind::reduce,         collective_kind::broadcast,
    collective_kind::all_gather,   collective_kind::reduce_scatter, collective_kind::all_to_all,
    collective_kind::all_to_all_v, collective_kind::gather,         collective_kind::scatter};

constexpr auto poison = std::byte{0xa5};

/// How many elements go from rank `q` to rank `r`.
std::uint64_t exchanged(std::size_t q, std::size_t r) { return (q + 2 * r) % 4; }

std::vector<std::vector<std::uint64_t>> all_counts(std::size_t n) {
  std::vector<std::vector<std::uint64_t>> counts(n, std::vector<std::uint64_t>(n));
  for (std::size_t q = 0; q < n; ++q)
    for (std::size_t r = 0; r < n; ++r)
      counts[q][r] = exchanged(q, r);
  return counts;
}

/// The blocks one behind the other, as a world lays them out.
std::vector<exchange_plan> packed_plans(std::size_t n) {
  std::vector<exchange_plan> plans(n);
  for (std::size_t q = 0; q < n; ++q) {
    auto& plan = plans[q];
    std::size_t sent = 0;
    std::size_t received = 0;
    for (std::size_t r = 0; r < n; ++r) {
      plan.send_offsets.push_back(std::exchange(sent, sent + exchanged(q, r)));
      plan.recv_offsets.push_back(std::exchange(received, received + exchanged(r, q)));
      plan.send_counts.push_back(exchanged(q, r));
      plan.recv_counts.push_back(exchanged(r, q));
    }
  }
  return plans;
}

/// A collective of one type over all ranks of a world, with its memory.
class round_of {
public:
  round_of(const world& over, collective_spec spec) : over_(over), spec_(std::move(spec)) {
    auto n = over.size();
    spec_.ranks = static_cast<int>(n);
    if (spec_.what == collective_kind::all_to_all_v)
      spec_.plans = packed_plans(n);
    sends_ = random_sends(spec_);
    for (std::size_t rank = 0; rank < n; ++rank) {
      auto device = over.device_of(rank);
      auto r = static_cast<int>(rank);
      send_.push_back(must(device.allocate(spec_.type, send_count(spec_, r)).wait()));
      recv_.push_back(must(device.allocate(spec_.type, recv_count(spec_, r)).wait()));
      put(device, send_.back(),
          std::span{sends_[rank]}.first(std::min(sends_[rank].size(), send_.back().size_bytes())));
      before_.emplace_back(recv_.back().size_bytes(), poison);
      put(device, recv_.back(), before_.back());
    }
  }

  /// What a world is asked.
  collective request() const {
    collective x;
    x.kind = spec_.what;
    x.op = spec_.op;
    x.peer = spec_.root;
    auto root = static_cast<std::size_t>(spec_.root);
    bool root_sends = x.kind == collective_kind::broadcast || x.kind == collective_kind::scatter;
    bool root_receives = x.kind == collective_kind::reduce || x.kind == collective_kind::gather;
    x.send = root_sends ? std::vector{send_[root]} : send_;
    x.recv = root_receives ? std::vector{recv_[root]} : recv_;
    if (x.kind == collective_kind::all_to_all_v)
      x.counts = all_counts(over_.size());
    return x;
  }

  void expect_right() const {
    for (std::size_t rank = 0; rank < over_.size(); ++rank) {
      auto after = must(get(over_.device_of(rank), recv_[rank]));
      auto found = check_collective(spec_, static_cast<int>(rank), sends_, before_[rank], after);
      EXPECT_TRUE(found) << to_string(spec_.what) << " of " << to_string(spec_.type) << ", rank "
                         << rank << " of " << over_.size() << ": " << to_string(found);
    }
  }

  std::vector<any_gpu_ref> send() const { return send_; }
  std::vector<any_gpu_ref> recv() const { return recv_; }

private:
  const world& over_;
  collective_spec spec_;
  std::vector<std::vector<std::byte>> sends_;
  std::vector<std::vector<std::byte>> before_;
  std::vector<any_gpu_ref> send_;
  std::vector<any_gpu_ref> recv_;
};

class Collectives : public ::testing::TestWithParam<int> {};

TEST_P(Collectives, AreRightForEveryKindAndType) {
  test_system system{{.devices = GetParam()}};
  if (system.devices() < GetParam())
    GTEST_SKIP() << "needs " << GetParam() << " devices";
  auto world = system.open_world({});
  std::uint64_t seed = 0;
  for (auto kind : kinds)
    for (auto type : all_dtypes)
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

// Each rank sends to the next one, and the first collective stands between: as one.
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
  all.calls.push_back(sum.request()); // writes what another of the group writes
  EXPECT_TRUE(has_code(answer_of(under_test.run(all)), errc::invalid_argument));
  EXPECT_TRUE(has_code(answer_of(under_test.run(group{})), errc::invalid_argument));
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
