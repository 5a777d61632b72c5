#include "backend/cuda/cuda_error.hpp"
#include "backend/cuda/nccl_communicator.hpp"
#include "backend/cuda/nccl_fixture.hpp"
#include "backend/cuda/nccl_group.hpp"
#include "support/backend_fixture.hpp"
#include "support/expect.hpp"
#include "support/gpus.hpp"
#include "support/reference.hpp"
#include <troupe/backend.hpp>
#include <troupe/collective_kind.hpp>
#include <troupe/dtype.hpp>
#include <troupe/error.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <future>
#include <iostream>
#include <iterator>
#include <memory>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

using kind = collective_kind;
using clock = std::chrono::steady_clock;

constexpr kind collectives[] = {kind::all_reduce,     kind::reduce,     kind::broadcast,
                                kind::all_gather,     kind::gather,     kind::scatter,
                                kind::reduce_scatter, kind::all_to_all, kind::all_to_all_v};
constexpr kind reducing[] = {kind::all_reduce, kind::reduce, kind::reduce_scatter};
constexpr kind rooted[] = {kind::reduce, kind::broadcast, kind::gather, kind::scatter};
constexpr reduce_op all_ops[] = {reduce_op::sum, reduce_op::prod, reduce_op::min,
                                 reduce_op::max, reduce_op::avg,  reduce_op::premul_sum};

bool is_float8(dtype x) { return x == dtype::float8_e4m3 || x == dtype::float8_e5m2; }

template <class T, std::size_t N> bool contains(const T (&list)[N], T x) {
  return std::ranges::find(list, x) != std::end(list);
}

using random = std::mt19937_64;

/// @shape n > 0
std::size_t below(random& dice, std::size_t n) { return static_cast<std::size_t>(dice() % n); }

template <class T, std::size_t N> T one_of(random& dice, const T (&list)[N]) {
  return list[below(dice, N)];
}

std::byte* at_byte(void* memory, std::size_t offset) {
  return static_cast<std::byte*>(memory) + offset;
}

std::string describe(const collective_spec& x, bool shared) {
  return std::string{to_string(x.what)} + ", " + std::string{to_string(x.type)} + ", " +
         std::string{to_string(x.op)} + ", " + std::to_string(x.count) + " elements, " +
         std::to_string(x.ranks) + " ranks, root " + std::to_string(x.root) +
         (shared ? ", in place" : "");
}

/// A communicator whose ranks are on any devices.
struct world {
  std::vector<int> devices; // by rank
  communicator_ranks ranks;

  int size() const { return static_cast<int>(ranks.size()); }
  backend_communicator& operator[](int rank) { return *ranks[static_cast<std::size_t>(rank)]; }
};

class NcclCollectives : public NcclFixture {
protected:
  /// Builds a communicator of the last `size` devices, the last one first.
  world build(int size) {
    world result;
    std::vector<local_rank> where;
    for (int i = 0; i < size; ++i) {
      result.devices.push_back(size_ - 1 - i);
      where.push_back({i, size_ - 1 - i});
    }
    result.ranks = must(cuda_->build(must(cuda_->make_communicator_id()), size, where));
    return result;
  }

  void connect(world& x) {
    on_threads(x.size(), [&](int rank) {
      must(of(x, rank).device->bind());
      must(x[rank].connect(of(x, rank).stream, connect_scope::everything));
    });
  }

  world connected(int size) {
    auto result = build(size);
    connect(result);
    return result;
  }

  void destroy(world x) { EXPECT_TRUE(is_ok(cuda_->destroy(std::move(x.ranks)))); }

  nccl_member& of(const world& x, int rank) {
    return at(x.devices[static_cast<std::size_t>(rank)]);
  }

  /// Returns 1, 2, ... up to the number of devices.
  std::vector<int> sizes() const {
    std::vector<int> result;
    for (int i = 1; i <= size_; ++i)
      result.push_back(i);
    return result;
  }

  bool can(const collective_spec& x) const {
    return float8_ || !is_float8(x.type) || !contains(reducing, x.what);
  }

  /// Runs one collective on all ranks. Checks every element of every rank, and some elements behind
  /// them.
  /// @shape shared: in place where possible
  void expect_right(world& w, const collective_spec& spec, bool shared) {
    const auto x = completed(spec);
    const auto sends = random_sends(x);
    std::vector<check_result> results(w.ranks.size());
    on_threads(x.ranks, [&](int rank) {
      results[static_cast<std::size_t>(rank)] =
          run_checked(of(w, rank), w[rank], x, rank, sends, shared);
    });
    for (std::size_t i = 0; i < results.size(); ++i)
      EXPECT_TRUE(results[i]) << describe(x, shared) << ", rank " << i << ": "
                              << to_string(results[i]);
  }

  void finish(const world& x) {
    for (int rank = 0; rank < x.size(); ++rank)
      of(x, rank).finish();
  }
};

} // namespace

TEST_F(NcclCollectives, DoEveryKindWithEveryType) {
  random dice{1};
  for (const int size : sizes()) {
    auto w = connected(size);
    for (const auto what : collectives)
      for (const auto type : real_dtypes)
        for (const std::size_t count : {0u, 1u, 7u, 1000u})
          for (const bool shared : {false, true}) {
            const collective_spec x{.what = what,
                                    .type = type,
                                    .count = count,
                                    .ranks = size,
                                    .op = one_of(dice, all_ops),
                                    .root = static_cast<int>(below(dice, w.ranks.size())),
                                    .seed = dice(),
                                    .kind = dice() % 2 == 0 ? input_kind::any : input_kind::exact};
            if (can(x))
              expect_right(w, x, shared);
          }
    destroy(std::move(w));
  }
}

TEST_F(NcclCollectives, DoEveryOperationWithEveryType) {
  random dice{2};
  for (const int size : {1, 2, size_}) {
    if (size > size_)
      continue;
    auto w = connected(size);
    for (const auto what : reducing)
      for (const auto type : real_dtypes)
        for (const auto op : all_ops)
          for (const auto inputs : {input_kind::any, input_kind::exact}) {
            const collective_spec x{.what = what,
                                    .type = type,
                                    .count = 1 + below(dice, 3000),
                                    .ranks = size,
                                    .op = op,
                                    .root = static_cast<int>(below(dice, w.ranks.size())),
                                    .seed = dice(),
                                    .kind = inputs};
            if (can(x))
              expect_right(w, x, dice() % 2 == 0);
          }
    destroy(std::move(w));
  }
}

TEST_F(NcclCollectives, HaveEveryRankAsRoot) {
  random dice{3};
  for (const int size : sizes()) {
    auto w = connected(size);
    for (const auto what : rooted)
      for (int root = 0; root < size; ++root)
        for (const auto type : {dtype::uint8, dtype::float32, dtype::int64})
          for (const bool shared : {false, true})
            expect_right(w,
                         {.what = what,
                          .type = type,
                          .count = 1 + below(dice, 5000),
                          .ranks = size,
                          .root = root,
                          .seed = dice()},
                         shared);
    destroy(std::move(w));
  }
}

TEST_F(NcclCollectives, DoLargeBuffers) {
  constexpr std::size_t large = std::size_t{1} << 20;
  random dice{4};
  auto w = connected(size_);
  for (const auto what : collectives)
    for (const auto type : real_dtypes) {
      // The inputs of these kinds have n * n * count elements.
      const bool many =
          what == kind::reduce_scatter || what == kind::all_to_all || what == kind::all_to_all_v;
      const collective_spec x{.what = what,
                              .type = type,
                              .count =
                                  many && type != dtype::uint8 ? large / w.ranks.size() : large,
                              .ranks = size_,
                              .root = static_cast<int>(below(dice, w.ranks.size())),
                              .seed = dice(),
                              .kind = input_kind::exact};
      if (can(x))
        expect_right(w, x, dice() % 2 == 0);
    }
  destroy(std::move(w));
}

/// Every device can move bytes. Only a reduction needs a newer device.
TEST_F(NcclCollectives, MoveFloat8OnEveryDevice) {
  random dice{5};
  auto w = connected(size_);
  for (const auto type : {dtype::float8_e4m3, dtype::float8_e5m2}) {
    for (const auto what : collectives)
      if (!contains(reducing, what))
        expect_right(w, {.what = what, .type = type, .count = 777, .ranks = size_, .seed = dice()},
                     false);
    if (float8_)
      continue;
    for (const auto what : reducing) {
      const collective_call call{
          .what = what, .send = of(w, 0).send, .recv = of(w, 0).recv, .count = 4, .type = type};
      EXPECT_TRUE(has_code(w[0].enqueue({&call, 1}, of(w, 0).stream), errc::not_supported));
    }
  }
  destroy(std::move(w));
}

namespace {

/// The messages and collectives of all ranks in one group.
struct traffic {
  struct message {
    int from = 0;
    int to = 0;
    dtype type = dtype::uint8;
    std::vector<std::byte> content;
    std::size_t at = 0; // offset in the sender's and in the receiver's buffer
  };
  struct collective {
    collective_spec spec;
    std::vector<std::vector<std::byte>> sends;
    std::size_t at = 0;
    std::size_t bytes = 0; // of either buffer, at most
  };
  std::vector<message> messages;
  std::vector<collective> joint;
  std::size_t bytes = 0;
};

constexpr dtype traffic_types[] = {dtype::uint8, dtype::float16, dtype::int32, dtype::float64,
                                   dtype::float8_e4m3};

/// Returns the offset for the next `bytes`, with a gap behind them.
std::size_t placed(traffic& x, std::size_t bytes) {
  constexpr std::size_t step = 256;
  return std::exchange(x.bytes, x.bytes + (bytes / step + 2) * step);
}

traffic random_traffic(std::uint64_t seed, int ranks, std::size_t collective_count) {
  constexpr std::size_t counts[] = {0, 1, 7, 1000, 40'000};
  random dice{seed};
  const auto n = static_cast<std::size_t>(ranks);
  traffic result;
  for (std::size_t i = below(dice, 4 * n + 1); i > 0; --i) {
    traffic::message x;
    x.from = static_cast<int>(below(dice, n));
    x.to = static_cast<int>(below(dice, n));
    x.type = one_of(dice, traffic_types);
    x.content.resize(one_of(dice, counts) * size_of(x.type));
    for (auto& byte : x.content)
      byte = static_cast<std::byte>(dice());
    x.at = placed(result, x.content.size());
    result.messages.push_back(std::move(x));
  }
  for (std::size_t i = 0; i < collective_count; ++i) {
    traffic::collective x;
    x.spec.what = below(dice, 8) == 0 ? kind::barrier : one_of(dice, collectives);
    x.spec.type = contains(reducing, x.spec.what) ? dtype::float32 : one_of(dice, traffic_types);
    x.spec.count = one_of(dice, counts) / n;
    x.spec.ranks = ranks;
    x.spec.op = one_of(dice, all_ops);
    x.spec.root = static_cast<int>(below(dice, n));
    x.spec.seed = dice();
    x.spec = completed(x.spec);
    x.sends = random_sends(x.spec);
    for (int rank = 0; rank < ranks; ++rank)
      x.bytes = std::max({x.bytes, send_count(x.spec, rank) * size_of(x.spec.type),
                          recv_count(x.spec, rank) * size_of(x.spec.type)});
    x.at = placed(result, x.bytes);
    result.joint.push_back(std::move(x));
  }
  return result;
}

/// Returns one rank's calls in random order. Sends, recvs and collectives keep their own order.
std::vector<collective_call> calls_of(const traffic& x, int rank, const nccl_member& self,
                                      random& dice) {
  std::array<std::vector<collective_call>, 3> queues;
  for (const auto& m : x.messages) {
    const auto count = m.content.size() / size_of(m.type);
    if (m.from == rank)
      queues[0].push_back({.what = kind::send,
                           .send = at_byte(self.send, m.at),
                           .count = count,
                           .type = m.type,
                           .peer = m.to});
    if (m.to == rank)
      queues[1].push_back({.what = kind::recv,
                           .recv = at_byte(self.recv, m.at),
                           .count = count,
                           .type = m.type,
                           .peer = m.from});
  }
  for (const auto& c : x.joint)
    queues[2].push_back(call_of(c.spec, rank, at_byte(self.send, c.at), at_byte(self.recv, c.at)));
  std::vector<collective_call> result;
  std::array<std::size_t, 3> taken{};
  for (auto left = queues[0].size() + queues[1].size() + queues[2].size(); left > 0;) {
    const auto i = below(dice, queues.size());
    if (taken[i] == queues[i].size())
      continue;
    result.push_back(queues[i][taken[i]++]);
    --left;
  }
  return result;
}

std::vector<std::byte> outbox_of(const traffic& x, int rank) {
  std::vector<std::byte> result(x.bytes);
  auto put = [&](std::size_t at, const std::vector<std::byte>& content) {
    std::ranges::copy(content, result.begin() + static_cast<std::ptrdiff_t>(at));
  };
  for (const auto& m : x.messages)
    if (m.from == rank)
      put(m.at, m.content);
  for (const auto& c : x.joint)
    put(c.at, c.sends[static_cast<std::size_t>(rank)]);
  return result;
}

/// Returns the errors in a rank's output, or an empty text.
std::string complaint(const traffic& x, int rank, const std::vector<std::byte>& got) {
  std::vector<std::byte> want(x.bytes);
  poison(want);
  const auto before = want;
  for (const auto& m : x.messages)
    if (m.to == rank)
      std::ranges::copy(m.content, want.begin() + static_cast<std::ptrdiff_t>(m.at));
  for (const auto& c : x.joint) {
    const auto bytes = recv_count(c.spec, rank) * size_of(c.spec.type);
    if (auto result =
            check_collective(c.spec, rank, c.sends, std::span{before}.subspan(c.at, bytes),
                             std::span{got}.subspan(c.at, bytes));
        !result)
      return describe(c.spec, false) + ": " + to_string(result);
    std::memcpy(want.data() + c.at, got.data() + c.at, bytes);
  }
  const auto result = check_equal(dtype::uint8, want, got);
  if (result)
    return {};
  for (const auto& m : x.messages)
    if (m.to == rank && result.first >= m.at && result.first < m.at + m.content.size())
      return "message from " + std::to_string(m.from) + ", " + to_string(result);
  return "memory that must not change: " + to_string(result);
}

} // namespace

class NcclGroups : public NcclCollectives {
protected:
  void expect_right(world& w, std::uint64_t seed, std::size_t collective_count) {
    const auto x = random_traffic(seed, w.size(), collective_count);
    ASSERT_LE(x.bytes, nccl_member::buffer_bytes);
    std::vector<std::string> complaints(w.ranks.size());
    on_threads(w.size(), [&](int rank) {
      auto& self = of(w, rank);
      must(self.device->bind());
      std::vector<std::byte> poisoned(x.bytes);
      poison(poisoned);
      self.write(self.recv, poisoned);
      self.write(self.send, outbox_of(x, rank));
      random dice{seed + 1000 * static_cast<std::uint64_t>(rank + 1)};
      const auto calls = calls_of(x, rank, self, dice);
      if (!calls.empty())
        must(w[rank].enqueue(calls, self.stream));
      complaints[static_cast<std::size_t>(rank)] =
          complaint(x, rank, self.read(self.recv, x.bytes));
    });
    for (std::size_t rank = 0; rank < complaints.size(); ++rank)
      EXPECT_EQ(complaints[rank], "")
          << "seed " << seed << ", " << w.size() << " ranks, rank " << rank;
  }
};

TEST_F(NcclGroups, PassMessagesOfAnyPattern) {
  for (const int size : sizes()) {
    auto w = connected(size);
    for (std::uint64_t seed = 1; seed <= 30; ++seed)
      expect_right(w, seed, 0);
    destroy(std::move(w));
  }
}

TEST_F(NcclGroups, MixMessagesAndCollectives) {
  for (const int size : sizes()) {
    auto w = connected(size);
    for (std::uint64_t seed = 101; seed <= 130; ++seed)
      expect_right(w, seed, 1 + seed % 6);
    destroy(std::move(w));
  }
}

/// More collectives than fit into one kernel.
TEST_F(NcclGroups, HoldHundredsOfCollectives) {
  auto w = connected(size_);
  expect_right(w, 201, 300);
  destroy(std::move(w));
}

TEST_F(NcclGroups, AreOpenedWhereTheyAreNeeded) {
  TROUPE_NEEDS_GPUS(2);
  auto w = connected(size_);
  auto groups_of = [&](std::function<std::vector<collective_call>(int)> calls) {
    const auto begun = detail::group_count::begun();
    on_threads(size_, [&](int rank) {
      must(of(w, rank).device->bind());
      if (const auto mine = calls(rank); !mine.empty())
        must(w[rank].enqueue(mine, of(w, rank).stream));
    });
    finish(w);
    EXPECT_EQ(detail::group_count::open(), 0u);
    return detail::group_count::begun() - begun;
  };
  auto call = [&](kind what, int rank) {
    return collective_call{
        .what = what, .send = of(w, rank).send, .recv = of(w, rank).recv, .count = 8};
  };
  const auto n = static_cast<std::uint64_t>(size_);
  for (const auto what : {kind::all_reduce, kind::reduce, kind::broadcast, kind::all_gather,
                          kind::reduce_scatter, kind::barrier})
    EXPECT_EQ(groups_of([&](int rank) { return std::vector{call(what, rank)}; }), 0u)
        << to_string(what);
  EXPECT_EQ(groups_of([&](int rank) -> std::vector<collective_call> {
              auto message = call(rank == 0 ? kind::send : kind::recv, rank);
              message.peer = 1 - rank;
              return rank < 2 ? std::vector{message} : std::vector<collective_call>{};
            }),
            0u);
  for (const auto what : {kind::gather, kind::scatter})
    EXPECT_EQ(groups_of([&](int rank) { return std::vector{call(what, rank)}; }), 1u)
        << to_string(what) << ": the root's";
  EXPECT_EQ(groups_of([&](int rank) { return std::vector{call(kind::all_to_all, rank)}; }), n);
  EXPECT_EQ(groups_of([&](int rank) {
              return std::vector{call(kind::all_reduce, rank), call(kind::barrier, rank)};
            }),
            n);
  EXPECT_EQ(groups_of([&](int rank) {
              auto nothing = call(kind::all_to_all, rank);
              nothing.count = 0;
              return std::vector{nothing, nothing};
            }),
            0u);
  destroy(std::move(w));
}

/// A failed call in a group ends the group once, and the group's error is that of the call.
TEST_F(NcclGroups, EndWhenACallFails) {
  must(at(0).device->bind());
  // Without an NCCL handle.
  detail::nccl_communicator nowhere{{0, 0},
                                    2,
                                    true,
                                    {},
                                    {},
                                    std::make_shared<detail::driver_access>(),
                                    std::make_shared<const std::atomic<bool>>(false)};
  const auto begun = detail::group_count::begun();
  const collective_call exchange{
      .what = kind::all_to_all, .send = at(0).send, .recv = at(0).recv, .count = 8};
  auto err = nowhere.enqueue({&exchange, 1}, at(0).stream, {});
  ASSERT_TRUE(failure_of(err));
  EXPECT_EQ(failure_of(err).value().api, "ncclSend");
  EXPECT_EQ(failure_of(err).value().native_name, "ncclInvalidArgument");
  EXPECT_EQ(detail::group_count::begun(), begun + 1);
  EXPECT_EQ(detail::group_count::open(), 0u);
  EXPECT_EQ(detail::teardown_errors(), before_);
  float factor = 2;
  const collective_call scaled{.what = kind::reduce,
                               .send = at(0).send,
                               .recv = at(0).recv,
                               .count = 8,
                               .type = dtype::float32,
                               .op = reduce_op::premul_sum,
                               .factor = &factor};
  err = nowhere.enqueue({&scaled, 1}, at(0).stream, {});
  ASSERT_TRUE(failure_of(err));
  EXPECT_EQ(failure_of(err).value().api, "ncclRedOpCreatePreMulSum");
  auto w = connected(size_); // no group is left open on any thread
  NcclCollectives::expect_right(
      w, {.what = kind::all_reduce, .type = dtype::int32, .count = 100, .ranks = size_}, false);
  destroy(std::move(w));
}

/// The unit tests have the whole list. Here the ranks must continue to work.
TEST_F(NcclCollectives, RefuseBadArgumentsAndGoOn) {
  auto w = connected(size_);
  auto& self = of(w, 0);
  const collective_call good{
      .what = kind::all_reduce, .send = self.send, .recv = self.recv, .count = 8};
  auto refused = [&](std::vector<collective_call> calls) {
    return has_code(w[0].enqueue(calls, self.stream), errc::invalid_argument);
  };
  EXPECT_TRUE(refused({}));
  EXPECT_TRUE(has_code(w[0].enqueue({&good, 1}, {}), errc::invalid_argument));
  for (const auto what : collectives) {
    auto bad = good;
    bad.what = what;
    bad.send = bad.recv = nullptr;
    bad.count = 8;
    EXPECT_TRUE(refused({bad})) << to_string(what);
    EXPECT_TRUE(refused({good, bad})) << to_string(what);
    bad = good;
    bad.what = what;
    bad.type = static_cast<dtype>(99);
    EXPECT_TRUE(refused({bad})) << to_string(what);
    EXPECT_TRUE(refused({good, good, bad})) << to_string(what);
  }
  for (const auto what : rooted) {
    auto bad = good;
    bad.what = what;
    bad.peer = size_;
    EXPECT_TRUE(refused({good, bad})) << to_string(what);
  }
  for (const auto what : {kind::send, kind::recv}) {
    auto bad = good;
    bad.what = what;
    bad.peer = 0; // to itself, without a matching call
    EXPECT_TRUE(refused({good, bad})) << to_string(what);
  }
  expect_right(w, {.what = kind::all_reduce, .type = dtype::int32, .count = 100, .ranks = size_},
               false);
  destroy(std::move(w));
}

TEST_F(NcclCollectives, OfABarrierNobodyPassesBeforeAllHaveCome) {
  TROUPE_NEEDS_GPUS(2);
  auto w = connected(size_);
  const collective_call barrier{.what = kind::barrier};
  for (int late = 0; late < size_; ++late) {
    stream_gate gate;
    gate.enqueue(*of(w, late).device, of(w, late).stream);
    for (int rank = 0; rank < size_; ++rank) {
      auto& self = of(w, rank);
      must(w[rank].enqueue({&barrier, 1}, self.stream));
      must(self.device->record(self.event, self.stream));
    }
    gate.wait_reached();
    for (const auto until = clock::now() + std::chrono::milliseconds{20}; clock::now() < until;)
      for (int rank = 0; rank < size_; ++rank)
        EXPECT_FALSE(must(of(w, rank).device->query(of(w, rank).event)))
            << "rank " << rank << " without " << late;
    gate.open();
    for (int rank = 0; rank < size_; ++rank)
      must(of(w, rank).device->synchronize(of(w, rank).event));
  }
  destroy(std::move(w));
}

namespace {

/// The first calls of rank `rank` of `n`, in three sizes if the kind has sizes, and its plans.
struct first_calls {
  std::string name;
  std::function<std::vector<std::vector<collective_call>>(int rank, const nccl_member&)> groups;
};

constexpr std::size_t first_counts[] = {1, 16'384, std::size_t{1} << 20};

std::vector<first_calls> all_first_calls(int n, std::vector<exchange_plan>& plans) {
  plans.clear();
  for (const auto count : first_counts) {
    const auto entries = static_cast<std::size_t>(n);
    exchange_plan plan;
    for (std::size_t i = 0; i < entries; ++i)
      plan.send_offsets.push_back(i * count);
    plan.recv_offsets = plan.send_offsets;
    plan.send_counts = plan.recv_counts = std::vector<std::size_t>(entries, count);
    plans.push_back(std::move(plan));
  }
  auto call = [&plans, n](kind what, int rank, const nccl_member& self, std::size_t size) {
    const bool message = what == kind::send || what == kind::recv;
    return collective_call{.what = what,
                           .send = self.send,
                           .recv = self.recv,
                           .count = first_counts[size],
                           .type = dtype::float32,
                           .peer = message ? n - 1 - rank : n - 1,
                           .plan = what == kind::all_to_all_v ? &plans[size] : nullptr};
  };
  std::vector<first_calls> result;
  auto in_three_sizes = [&](std::string name, auto change) {
    result.push_back({std::move(name), [=](int rank, const nccl_member& self) {
                        std::vector<std::vector<collective_call>> groups;
                        for (std::size_t size = 0; size < std::size(first_counts); ++size)
                          if (auto group = change(rank, self, size); !group.empty())
                            groups.push_back(std::move(group));
                        return groups;
                      }});
  };
  for (const auto what : collectives)
    in_three_sizes(std::string{to_string(what)},
                   [=](int rank, const nccl_member& self, std::size_t size) {
                     return std::vector{call(what, rank, self, size)};
                   });
  in_three_sizes("barrier", [=](int rank, const nccl_member& self, std::size_t size) {
    return std::vector{call(kind::barrier, rank, self, size)};
  });
  for (const auto first : {kind::send, kind::recv})
    in_three_sizes(std::string{to_string(first)},
                   [=](int rank, const nccl_member& self, std::size_t size) {
                     const auto other = first == kind::send ? kind::recv : kind::send;
                     std::vector<collective_call> group;
                     if (rank == 0 || rank == n - 1)
                       group.push_back(call(rank == 0 ? first : other, rank, self, size));
                     return group;
                   });
  static constexpr float factor = 0.5F;
  for (const auto& [what, op] :
       {std::pair{kind::all_reduce, reduce_op::prod}, std::pair{kind::all_reduce, reduce_op::avg},
        std::pair{kind::reduce, reduce_op::premul_sum},
        std::pair{kind::reduce_scatter, reduce_op::prod}})
    in_three_sizes(std::string{to_string(what)} + '_' + std::string{to_string(op)},
                   [=](int rank, const nccl_member& self, std::size_t size) {
                     auto x = call(what, rank, self, size);
                     x.op = op;
                     x.factor = &factor;
                     return std::vector{x};
                   });
  for (const auto what : {kind::all_reduce, kind::all_gather, kind::reduce_scatter})
    for (const int many : {100, 1000})
      result.push_back({std::string{to_string(what)} + "_group_of_" + std::to_string(many),
                        [=](int rank, const nccl_member& self) {
                          const std::vector<collective_call> group(static_cast<std::size_t>(many),
                                                                   call(what, rank, self, 0));
                          return std::vector<std::vector<collective_call>>{group};
                        }});
  return result;
}

} // namespace

/// Once connected, the first call of any kind returns before any peer has called.
TEST_F(NcclCollectives, DoNotWaitForPeersInTheFirstCallOfAKind) {
  TROUPE_NEEDS_GPUS(2);
  for (const int size : {2, size_}) {
    std::vector<exchange_plan> plans;
    for (const auto& [name, groups] : all_first_calls(size, plans)) {
      auto w = connected(size);
      clock::duration longest{};
      auto enqueue_all = [&](int rank, bool timed) {
        auto& self = of(w, rank);
        must(self.device->bind());
        for (const auto& group : groups(rank, self)) {
          const auto start = clock::now();
          must(w[rank].enqueue(group, self.stream));
          if (timed)
            longest = std::max(longest, clock::now() - start);
        }
      };
      auto alone = std::async(std::launch::async, enqueue_all, 0, true);
      const bool returned = alone.wait_for(std::chrono::seconds{5}) == std::future_status::ready;
      EXPECT_TRUE(returned) << name << ", " << size << " ranks: waits for the others";
      on_threads(size - 1, [&](int i) { enqueue_all(i + 1, false); });
      alone.get();
      finish(w);
      for (auto& rank : w.ranks)
        EXPECT_TRUE(is_ok(rank->asynchronous_error()));
      const auto us = std::chrono::duration_cast<std::chrono::microseconds>(longest);
      EXPECT_LT(us, std::chrono::milliseconds{100}) << name << ", " << size << " ranks";
      RecordProperty("first_" + name + "_" + std::to_string(size) + "_ranks_us",
                     std::to_string(us.count()));
      std::cout << "first call of " << name << " on " << size << " ranks: " << us.count()
                << " us\n";
      destroy(std::move(w));
    }
    if (size_ == 2)
      break;
  }
}

TEST_F(NcclCollectives, TellHowLongConnectingTakes) {
  for (const int size : sizes()) {
    const auto start = clock::now();
    auto w = build(size);
    const auto built = clock::now();
    connect(w);
    const auto end = clock::now();
    auto ms = [](clock::duration x) {
      return std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(x).count());
    };
    std::cout << size << " ranks: built in " << ms(built - start) << " ms, connected in "
              << ms(end - built) << " ms\n";
    RecordProperty("build_" + std::to_string(size) + "_ranks_ms", ms(built - start));
    RecordProperty("connect_" + std::to_string(size) + "_ranks_ms", ms(end - built));
    EXPECT_LT(end - built, std::chrono::seconds{10});
    destroy(std::move(w));
  }
}

} // namespace troupe::testing
