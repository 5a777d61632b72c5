// Reactions of a world to the loss of a device, by its policy.

#include "actors/system.hpp"
#include "support/eventually.hpp"
#include "support/load.hpp"
#include "support/worker_losses.hpp"
#include <troupe/launch.hpp>
#include <troupe/mesh_comm.hpp>
#include <troupe/worker.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <future>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace troupe::testing {

namespace {

/// Devices in workers, and a world over them.
class LossPolicy : public ::testing::Test {
protected:
  void TearDown() override {
    for (auto* x : {&doors_->devices, &doors_->builds, &doors_->spares})
      x->open();
  }

  world& start(int devices, standby_policy standby, loss_policy on_loss = loss_policy::automatic,
               int restarts = 1000) {
    for (int i = 0; i < devices; ++i)
      doors_->refused[i] = 0;
    auto options = in_worker_processes(devices, doors_);
    options.faults = faults_;
    options.lanes.open_backoff = 10ms;
    system_.emplace(std::move(options));
    world_config config;
    config.limits.standby = standby;
    config.limits.on_loss = on_loss;
    config.limits.restarts = restarts;
    config.limits.restart_backoff = 1ms;
    config.collectives = collectives_;
    world_.emplace(system_->open_world(config));
    feed_.emplace(*system_, world_->actor());
    return *world_;
  }

  /// Kills the worker of `rank`. Returns the error that reports the loss.
  caf::error lose(std::size_t rank) { return kill_worker(world_->device_of(rank)); }

  world_status until_prepared() {
    return feed_->until(
        [](const world_status& x) { return x.phase == world_phase::ready && x.standby_ready; });
  }
  world_status until_members(std::size_t number, std::uint64_t from_epoch = 0) {
    return feed_->until([=](const world_status& x) {
      return x.phase == world_phase::ready && x.members.size() == number && x.epoch >= from_epoch;
    });
  }

  std::shared_ptr<fault_plan> faults_;                             ///< set before `start`
  collectives_policy collectives_ = collectives_policy::automatic; ///< the same
  std::shared_ptr<doors> doors_ = std::make_shared<doors>();
  std::optional<test_system> system_;
  std::optional<world> world_;
  std::optional<world_feed> feed_;
};

constexpr std::size_t ranks = 4;
constexpr std::size_t lost = 1;
constexpr std::int32_t untouched = -7;
using numbers = std::vector<std::int32_t>;
using all_numbers = std::vector<numbers>;

const std::vector<std::size_t> survivors{0, 2, 3};

/// A world that continues without one rank until the test opens the door.
class LossPolicyOfSurvivors : public LossPolicy {
protected:
  world& start_and_lose_one() {
    auto& w = start(ranks, standby_policy::communicators, loss_policy::shrink);
    until_prepared();
    doors_->devices.close();
    EXPECT_EQ(code_of(lose(lost)), errc::worker_lost);
    until_members(survivors.size());
    return w;
  }
};

numbers numbers_of(std::size_t rank, std::size_t count) {
  numbers result(count);
  std::iota(result.begin(), result.end(), static_cast<std::int32_t>(1000 * rank + 1));
  return result;
}

/// A collective over the survivors: what ranks send and what they must receive.
struct shrunk_case {
  const char* name;
  collective_kind kind;
  bool in_place;
};

std::size_t sent(collective_kind x, std::size_t count) {
  return x == collective_kind::reduce_scatter || x == collective_kind::scatter ||
                 x == collective_kind::all_to_all
             ? ranks * count
             : count;
}

std::size_t received(collective_kind x, std::size_t count) {
  return x == collective_kind::all_gather || x == collective_kind::gather ||
                 x == collective_kind::all_to_all
             ? ranks * count
             : count;
}

constexpr std::size_t count = 5;
constexpr std::size_t root = 2;

/// Returns the expected content of rank `r`, out of place.
numbers expected(collective_kind kind, std::size_t r, const all_numbers& send) {
  auto result = numbers(received(kind, count), untouched);
  auto copy = [&](std::size_t to, std::size_t from_rank, std::size_t from) {
    for (std::size_t i = 0; i < count; ++i)
      result[to * count + i] = send[from_rank][from * count + i];
  };
  auto add = [&](std::size_t part) {
    for (std::size_t i = 0; i < count; ++i) {
      result[i] = 0;
      for (auto q : survivors)
        result[i] += send[q][part * count + i];
    }
  };
  switch (kind) {
  case collective_kind::all_reduce:
    add(0);
    break;
  case collective_kind::reduce:
    if (r == root)
      add(0);
    break;
  case collective_kind::broadcast:
    copy(0, root, 0);
    break;
  case collective_kind::all_gather:
    for (std::size_t i = 0; i < survivors.size(); ++i)
      copy(i, survivors[i], 0);
    break;
  case collective_kind::gather:
    for (std::size_t i = 0; r == root && i < survivors.size(); ++i)
      copy(i, survivors[i], 0);
    break;
  case collective_kind::reduce_scatter:
    add(r);
    break;
  case collective_kind::scatter:
    copy(0, root, r);
    break;
  case collective_kind::all_to_all:
    for (std::size_t i = 0; i < survivors.size(); ++i)
      copy(i, survivors[i], r);
    break;
  default:
    ADD_FAILURE() << "no expectation";
  }
  return result;
}

constexpr shrunk_case shrunk_cases[] = {
    {"all_reduce", collective_kind::all_reduce, false},
    {"all_reduce in place", collective_kind::all_reduce, true},
    {"reduce", collective_kind::reduce, false},
    {"broadcast", collective_kind::broadcast, false},
    {"all_gather", collective_kind::all_gather, false},
    {"all_gather in place", collective_kind::all_gather, true},
    {"gather", collective_kind::gather, false},
    {"gather in place", collective_kind::gather, true},
    {"reduce_scatter", collective_kind::reduce_scatter, false},
    {"reduce_scatter in place", collective_kind::reduce_scatter, true},
    {"scatter", collective_kind::scatter, false},
    {"scatter in place", collective_kind::scatter, true},
    {"all_to_all", collective_kind::all_to_all, false},
};

using answers = std::vector<caf::expected<collective_done>>;

/// Makes the call of each surviving rank, with its own handles.
answers run_by_ranks(const world& w, collective_kind kind, const std::vector<any_gpu_ref>& from,
                     const std::vector<any_gpu_ref>& to, bool one_sends, bool one_receives) {
  std::vector<pending<collective_done>> calls;
  for (auto r : survivors) {
    collective x;
    x.kind = kind;
    x.peer = root;
    if (!one_sends || r == root)
      x.send = {from[r]};
    if (!one_receives || r == root)
      x.recv = {to[r]};
    calls.push_back(w.rank(r).run(x, {.allow_shrunk = true}));
  }
  answers result;
  for (auto& x : calls)
    result.push_back(answer_of(x));
  return result;
}

TEST_F(LossPolicyOfSurvivors, DoEveryCollective) {
  TROUPE_NEEDS_DEVICES(4);
  auto& w = start_and_lose_one();
  for (std::size_t run = 0; run < 2 * std::size(shrunk_cases); ++run) {
    const bool by_ranks = run % 2 != 0;
    auto& what = shrunk_cases[run / 2];
    SCOPED_TRACE(std::string{what.name} + (by_ranks ? ", by calls of the ranks" : ""));
    collective x;
    x.kind = what.kind;
    x.peer = root;
    all_numbers send(ranks);
    std::vector<any_gpu_ref> from(ranks);
    std::vector<any_gpu_ref> to(ranks);
    for (auto r : survivors) {
      auto d = w.device_of(r);
      send[r] = numbers_of(r, sent(what.kind, count));
      auto in = must(d.allocate<std::int32_t>(ranks * count));
      put(d, in, bytes_of(numbers(ranks * count, untouched)));
      auto part = [&](std::size_t begin, std::size_t n) {
        return any_gpu_ref{must(in.slice(begin, n))};
      };
      auto parts_out = received(what.kind, count) > count;
      auto parts_in = sent(what.kind, count) > count;
      if (what.in_place) {
        from[r] = parts_out ? part(r * count, count) : part(0, send[r].size());
        to[r] = parts_in ? part(r * count, count) : part(0, received(what.kind, count));
      } else {
        from[r] = part(0, send[r].size());
        to[r] = must(d.allocate<std::int32_t>(received(what.kind, count)));
        put(d, to[r], bytes_of(numbers(received(what.kind, count), untouched)));
      }
      put(d, from[r], bytes_of(send[r]));
    }
    auto one_sends =
        what.kind == collective_kind::broadcast || what.kind == collective_kind::scatter;
    auto one_receives =
        what.kind == collective_kind::reduce || what.kind == collective_kind::gather;
    x.send = one_sends ? std::vector{from[root]} : from;
    x.recv = one_receives ? std::vector{to[root]} : to;
    if (what.in_place && what.kind == collective_kind::scatter)
      for (auto r : survivors) // in place on the root only
        if (r != root) {
          to[r] = must(w.device_of(r).allocate<std::int32_t>(count));
          x.recv[r] = to[r];
        }
    for (auto& done : by_ranks ? run_by_ranks(w, x.kind, from, to, one_sends, one_receives)
                               : answers{answer_of(w.run(x, {.allow_shrunk = true}))}) {
      ASSERT_TRUE(done) << describe(done.error());
      EXPECT_EQ(done->ranks, (std::vector<std::int32_t>{0, 2, 3}));
    }
    for (auto r : survivors) {
      if (one_receives && r != root)
        continue;
      auto want = expected(what.kind, r, send);
      auto got = must(get(w.device_of(r), to[r]));
      if (what.in_place && received(what.kind, count) > count) // the rest is the rank's own part
        want.resize(survivors.size() * count), got.resize(survivors.size() * count * sizeof(int));
      EXPECT_EQ(got, (std::vector<std::byte>{bytes_of(want).begin(), bytes_of(want).end()}))
          << "rank " << r;
    }
  }
}

TEST_F(LossPolicyOfSurvivors, ExchangeAndSendInGroups) {
  TROUPE_NEEDS_DEVICES(4);
  auto& w = start_and_lose_one();
  auto block = [](std::size_t q, std::size_t r) {
    return static_cast<std::uint64_t>(1 + q + 2 * r);
  };
  all_to_all_v exchange;
  exchange.send.resize(ranks);
  exchange.recv.resize(ranks);
  exchange.counts.resize(ranks);
  all_numbers want(ranks);
  for (std::size_t q = 0; q < ranks; ++q)
    for (std::size_t r = 0; r < ranks; ++r)
      exchange.counts[q].push_back(block(q, r));
  auto content = [&](std::size_t q, std::size_t r) { return numbers_of(10 * q + r, block(q, r)); };
  for (auto r : survivors) {
    numbers sends;
    std::size_t room = 0;
    for (std::size_t q = 0; q < ranks; ++q) {
      auto to = content(r, q);
      sends.insert(sends.end(), to.begin(), to.end());
      room += block(q, r);
    }
    for (auto q : survivors) {
      auto from = content(q, r);
      want[r].insert(want[r].end(), from.begin(), from.end());
    }
    want[r].resize(room, untouched);
    auto d = w.device_of(r);
    exchange.send[r] = must(d.allocate<std::int32_t>(sends.size()));
    put(d, exchange.send[r], bytes_of(sends));
    exchange.recv[r] = must(d.allocate<std::int32_t>(room));
    put(d, exchange.recv[r], bytes_of(numbers(room, untouched)));
  }
  // A ring of messages in the same group, and a sum with factors.
  std::vector<any_gpu_ref> from(ranks);
  std::vector<any_gpu_ref> to(ranks);
  std::vector<any_gpu_ref> sums(ranks);
  for (auto r : survivors) {
    auto d = w.device_of(r);
    from[r] = must(d.allocate<std::int32_t>(count));
    put(d, from[r], bytes_of(numbers_of(r, count)));
    to[r] = must(d.allocate<std::int32_t>(count));
    sums[r] = must(d.allocate<std::int32_t>(count));
    put(d, sums[r], bytes_of(numbers(count, 1)));
  }
  group all;
  all.options.allow_shrunk = true;
  all.calls.push_back(exchange);
  for (std::size_t i = 0; i < survivors.size(); ++i) {
    const auto a = survivors[i];
    const auto b = survivors[(i + 1) % survivors.size()];
    all.calls.push_back(send_recv{static_cast<int>(a), static_cast<int>(b), from[a], to[b], {}});
  }
  all_reduce weighted{sums, sums, reduce_op::premul_sum, {}, {1, 10, 100, 1000}};
  all.calls.push_back(weighted);
  auto done = answer_of(w.run(all));
  ASSERT_TRUE(done) << describe(done.error());
  for (std::size_t i = 0; i < survivors.size(); ++i) {
    const auto a = survivors[i];
    const auto b = survivors[(i + 1) % survivors.size()];
    EXPECT_TRUE(holds(w.device_of(a), exchange.recv[a], want[a]));
    EXPECT_TRUE(holds(w.device_of(b), to[b], numbers_of(a, count)));
    EXPECT_TRUE(holds(w.device_of(a), sums[a], numbers(count, 1101)));
  }
}

TEST_F(LossPolicy, SurvivorsGoOnAndAreJoinedAgain) {
  TROUPE_NEEDS_DEVICES(3);
  auto& w = start(3, standby_policy::communicators, loss_policy::shrink);
  auto before = until_prepared();
  EXPECT_EQ(before.members.size(), 3u);
  const other_memory kept{w.device_of(0)};
  auto refs = must(w.allocate<float>(64));
  for (std::size_t i = 0; i < 3; ++i)
    ASSERT_TRUE(answer_of(w.device_of(i).fill(refs[i], 3.F)));
  doors_->devices.close();
  EXPECT_EQ(code_of(lose(2)), errc::worker_lost);
  auto shrunk = until_members(2);
  EXPECT_EQ(shrunk.membership, before.membership + 1);
  EXPECT_EQ(code_of(shrunk.reason), errc::worker_lost);
  EXPECT_EQ(shrunk.members, (std::vector<world_member>{before.members[0], before.members[1]}));

  // Without allow_shrunk, or with the old membership, a request fails and gets the new membership.
  std::vector<any_gpu_ref> all{refs[0], refs[1], refs[2]};
  for (auto options : {request_options{},
                       request_options{.membership = before.membership, .allow_shrunk = true}}) {
    auto refused = answer_of(w.all_reduce(all, all, reduce_op::sum, options));
    ASSERT_EQ(code_of(error_of(refused)), errc::membership_changed);
    auto view = status_of(refused.error());
    ASSERT_TRUE(view);
    EXPECT_EQ(view->members, shrunk.members);
  }
  for (std::size_t i = 0; i < 2; ++i) { // marks of the refused requests
    EXPECT_TRUE(has_code(refs[i].access(), errc::skipped));
    accept_bytes(w.device_of(i), refs[i]);
  }
  auto mean = answer_of(w.all_reduce(all, all, reduce_op::avg,
                                     {.membership = shrunk.membership, .allow_shrunk = true}));
  ASSERT_TRUE(mean) << describe(mean.error());
  EXPECT_EQ(mean->ranks, (std::vector<std::int32_t>{0, 1}));
  EXPECT_EQ(mean->membership, shrunk.membership);
  for (std::size_t i = 0; i < 2; ++i)
    EXPECT_TRUE(holds(w.device_of(i), refs[i], std::vector<float>(64, 3.F)));
  // Allocates on the remaining ranks only.
  auto fewer = w.allocate<float>(8, true, {.allow_shrunk = true});
  ASSERT_TRUE(fewer) << describe(fewer.error());
  ASSERT_EQ(fewer->size(), 3u);
  EXPECT_FALSE((*fewer)[2]);
  for (std::size_t i = 0; i < 2; ++i)
    EXPECT_TRUE(holds(w.device_of(i), (*fewer)[i], std::vector<float>(8, 0.F)));
  // Requests that need the missing rank.
  EXPECT_EQ(code_of(error_of(answer_of(w.broadcast(all[2], all, 2, {.allow_shrunk = true})))),
            errc::unavailable);
  EXPECT_EQ(code_of(error_of(answer_of(w.send_recv(0, all[0], 2, all[2], {.allow_shrunk = true})))),
            errc::unavailable);
  EXPECT_EQ(code_of(error_of(answer_of(w.rank(0).all_reduce(all[0], all[0], reduce_op::sum)))),
            errc::membership_changed);

  doors_->devices.open();
  auto whole = until_members(3);
  EXPECT_GT(whole.epoch, shrunk.epoch);
  EXPECT_EQ(whole.membership, shrunk.membership + 1);
  EXPECT_EQ(whole.members[2].incarnation, before.members[2].incarnation + 1);
  EXPECT_EQ(
      code_of(error_of(answer_of(w.all_reduce(
          all, all, reduce_op::sum, {.membership = shrunk.membership, .allow_shrunk = true})))),
      errc::membership_changed);
  EXPECT_TRUE(works(w));
  EXPECT_TRUE(kept.is_there());
  until_prepared();
}

/// Sums ones, by a call of each of `callers`. Returns the number of ranks, or the first error.
caf::expected<float> add_up_by_ranks(const world& w, const std::vector<any_gpu_ref>& refs,
                                     const std::vector<std::size_t>& callers,
                                     const request_options& options) {
  for (auto r : callers)
    if (auto filled = answer_of(w.device_of(r).fill(must(gpu_ref<float>::from(refs[r])), 1.F));
        !filled)
      return filled.error();
  std::vector<pending<collective_done>> calls;
  for (auto r : callers)
    calls.push_back(w.rank(r).all_reduce(refs[r], reduce_op::sum, options));
  for (auto& x : calls)
    if (auto done = answer_of(x); !done)
      return done.error();
  const auto sum = must(get(w.device_of(callers.front()), refs[callers.front()]));
  float result = 0;
  std::memcpy(&result, sum.data(), sizeof result);
  return result;
}

TEST_F(LossPolicyOfSurvivors, MatchTheCallsOfTheirRanks) {
  TROUPE_NEEDS_DEVICES(4);
  auto& w = start(ranks, standby_policy::communicators, loss_policy::shrink);
  const request_options may_shrink{.allow_shrunk = true};
  for (int cycle = 0; cycle < 2; ++cycle) {
    until_prepared();
    auto refs = must(w.allocate(dtype::float32, 16));
    // Before the loss the other ranks call neither the sum nor the recv.
    auto alone = w.rank(0).all_reduce(refs[0]);
    auto unheard = w.rank(0).send(refs[0], lost);
    doors_->devices.close();
    EXPECT_EQ(code_of(lose(lost)), errc::worker_lost);
    const auto shrunk = until_members(survivors.size());
    const auto why = error_of(answer_of(alone));
    EXPECT_TRUE(code_of(why) == errc::membership_changed || code_of(why) == errc::worker_lost)
        << describe(why);
    EXPECT_TRUE(error_of(answer_of(unheard)));
    auto fewer = may_shrink;
    if (cycle == 0) { // the call failed for all ranks, also for later calls
      for (std::size_t r : {2, 3})
        EXPECT_EQ(
            code_of(error_of(answer_of(w.rank(r).all_reduce(refs[r], reduce_op::sum, fewer)))),
            code_of(why));
    } else { // but not for calls that name the new membership
      fewer.membership = shrunk.membership;
    }

    for (int round = 0; round < 20; ++round) {
      auto sum = add_up_by_ranks(w, refs, survivors, fewer);
      ASSERT_TRUE(sum) << describe(sum.error());
      EXPECT_EQ(*sum, 3.F);
      // The calls of the remaining ranks count and form one operation.
      for (auto r : survivors)
        EXPECT_EQ(code_of(error_of(answer_of(w.rank(r).all_reduce(refs[r])))),
                  errc::membership_changed);
      EXPECT_EQ(
          code_of(error_of(answer_of(w.rank(lost).all_reduce(refs[lost], reduce_op::sum, fewer)))),
          errc::unavailable);
      for (auto r : survivors)
        accept_bytes(w.device_of(r), refs[r]);
    }
    auto sent = w.rank(0).send(refs[0], 3, fewer);
    auto received = w.rank(3).recv(refs[3], 0, fewer);
    EXPECT_FALSE(error_of(answer_of(sent)));
    EXPECT_FALSE(error_of(answer_of(received)));
    EXPECT_EQ(code_of(error_of(answer_of(w.rank(0).send(refs[0], lost, fewer)))),
              errc::unavailable);

    doors_->devices.open();
    until_members(ranks);
    refs[lost] = must(answer_of(w.device_of(lost).allocate(dtype::float32, 16)));
    for (int round = 0; round < 20; ++round) {
      SCOPED_TRACE("cycle " + std::to_string(cycle) + ", round " + std::to_string(round));
      auto sum =
          add_up_by_ranks(w, refs, {0, 1, 2, 3}, round % 2 == 0 ? request_options{} : may_shrink);
      ASSERT_TRUE(sum) << describe(sum.error());
      EXPECT_EQ(*sum, 4.F);
    }
    sent = w.rank(0).send(refs[0], lost);
    received = w.rank(lost).recv(refs[lost], 0);
    EXPECT_FALSE(error_of(answer_of(sent)));
    EXPECT_FALSE(error_of(answer_of(received)));
  }
}

/// Makes the calls of one rank while its device is in the world. The sum identifies the ranks that
/// took part, which must be those of the membership.
void add_up_as_rank(const world& w, std::size_t rank, const std::atomic<bool>& stop,
                    std::atomic<int>& right) {
  constexpr auto bit = [](std::size_t r) { return static_cast<std::int32_t>(1U << r); };
  const request_options soon{.deadline = 2s}; // its device may be lost meanwhile
  auto d = w.device_of(rank);
  any_gpu_ref ref;
  while (!stop) {
    const auto view = w.status();
    std::int32_t all = 0;
    bool is_member = false;
    for (auto& x : view.members) {
      all += bit(static_cast<std::size_t>(x.rank));
      is_member |= static_cast<std::size_t>(x.rank) == rank;
    }
    if (view.phase != world_phase::ready || !is_member) {
      std::this_thread::yield();
      continue;
    }
    if (!ref || !answer_of(d.fill(must(gpu_ref<std::int32_t>::from(ref)), bit(rank), soon))) {
      auto fresh = answer_of(d.allocate(dtype::int32, 1, false, soon));
      ref = fresh ? *fresh : any_gpu_ref{};
      continue;
    }
    auto done = answer_of(w.rank(rank).all_reduce(
        ref, reduce_op::sum,
        {.deadline = 2s, .membership = view.membership, .allow_shrunk = true}));
    auto bytes = done ? get(d, ref) : done.error();
    if (!bytes)
      continue;
    std::int32_t sum = 0;
    std::memcpy(&sum, bytes->data(), sizeof sum);
    EXPECT_EQ(sum, all) << "rank " << rank;
    ++right;
  }
}

TEST_F(LossPolicy, RanksFindEachOtherAgain) {
  TROUPE_NEEDS_DEVICES(3);
  constexpr std::size_t n = 3;
  auto& w = start(n, standby_policy::communicators, loss_policy::shrink);
  std::array<std::atomic<int>, n> right{};
  struct {
    std::atomic<bool> stop{false};
    std::vector<std::future<void>> ends; // their destructors wait
  } running;
  for (std::size_t r = 0; r < n; ++r)
    running.ends.push_back(
        std::async(std::launch::async, [&, r] { add_up_as_rank(w, r, running.stop, right[r]); }));
  auto stop_at_end = std::shared_ptr<void>{nullptr, [&](void*) { running.stop = true; }};
  auto all_go_on = [&] {
    std::array<int, n> before{};
    std::copy(right.begin(), right.end(), before.begin());
    return testing::eventually([&] {
      for (std::size_t r = 0; r < n; ++r)
        if (right[r] < before[r] + 10)
          return false;
      return true;
    });
  };
  for (int i = 0; i < 6; ++i) {
    const auto before = until_prepared();
    ASSERT_TRUE(all_go_on()) << "before kill " << i;
    static_cast<void>(lose(static_cast<std::size_t>(i) % n)); // the result may come too late
    until_members(n, before.epoch + 1);
  }
  EXPECT_TRUE(all_go_on());
}

/// A client of a shrinking world: sums ones over the remaining ranks.
void add_up_survivors(const world& w, const std::atomic<bool>& stop, std::atomic<int>& right,
                      std::atomic<int>& shrunk) {
  std::vector<any_gpu_ref> refs(w.size());
  const request_options soon{.deadline = 50ms}; // the view may be from before a loss
  while (!stop) {
    auto view = w.status();
    bool ready = true;
    for (auto& member : view.members) {
      auto i = static_cast<std::size_t>(member.rank);
      if (!refs[i] || refs[i].stale()) {
        auto fresh = answer_of(w.device_of(i).allocate(dtype::float32, 64, false, soon));
        ready = ready && fresh;
        if (fresh)
          refs[i] = *fresh;
      }
      ready =
          ready && answer_of(w.device_of(i).fill(must(gpu_ref<float>::from(refs[i])), 1.F, soon));
    }
    if (!ready)
      continue;
    auto done = answer_of(w.all_reduce(refs, refs, reduce_op::sum,
                                       {.membership = view.membership, .allow_shrunk = true}));
    if (!done) {
      EXPECT_TRUE(is_loss(done.error()) || code_of(done.error()) == errc::membership_changed)
          << describe(done.error());
      continue;
    }
    EXPECT_EQ(done->membership, view.membership);
    EXPECT_EQ(done->ranks.empty() ? w.size() : done->ranks.size(), view.members.size());
    bool whole = true;
    for (auto& member : view.members) {
      auto i = static_cast<std::size_t>(member.rank);
      std::vector<float> sum(64);
      auto got = answer_of(
          w.device_of(i).download(must(gpu_ref<float>::from(refs[i])), std::span{sum}, soon));
      // Where the memory is kept, the request waits until the device is back.
      ASSERT_TRUE(got || is_loss(got.error()) || code_of(got.error()) == errc::deadline_exceeded)
          << describe(got.error());
      if (got) {
        ASSERT_EQ(sum, std::vector<float>(64, static_cast<float>(view.members.size())));
      }
      whole = whole && got;
    }
    right += whole;
    shrunk += whole && view.members.size() < w.size();
  }
}

class Shrinks : public LossPolicy, public ::testing::WithParamInterface<standby_policy> {};

INSTANTIATE_TEST_SUITE_P(With, Shrinks,
                         ::testing::Values(standby_policy::communicators, standby_policy::none),
                         [](auto& x) { return std::string{to_string(x.param)}; });

TEST_P(Shrinks, AndGrowsUnderLoad) {
  TROUPE_NEEDS_DEVICES(2);
  constexpr int losses = 6;
  auto& w = start(3, GetParam(), loss_policy::shrink);
  const auto n = w.size();
  std::atomic<bool> stop = false;
  std::atomic<int> right = 0;
  std::atomic<int> shrunk = 0;
  std::thread client{[&] { add_up_survivors(w, stop, right, shrunk); }};
  std::uint64_t epoch = 0;
  for (int i = 0; i < losses; ++i) {
    if (GetParam() == standby_policy::communicators)
      until_prepared();
    epoch = until_members(n, epoch).epoch;
    EXPECT_TRUE(goes_on(right, 3)) << "after " << i << " losses";
    doors_->devices.close();
    EXPECT_EQ(code_of(lose(static_cast<std::size_t>(i) % n)), errc::worker_lost);
    EXPECT_TRUE(goes_on(shrunk, 3)) << "after " << i << " losses";
    doors_->devices.open();
    ++epoch;
  }
  until_members(n, epoch);
  EXPECT_TRUE(goes_on(right, 3));
  stop = true;
  client.join();
  EXPECT_TRUE(works(w));
}

TEST_F(LossPolicy, ShrinksTwiceAndWaitsWhenNobodyIsLeft) {
  TROUPE_NEEDS_DEVICES(3);
  auto& w = start(3, standby_policy::communicators, loss_policy::shrink);
  until_prepared();
  doors_->devices.close();
  EXPECT_EQ(code_of(lose(0)), errc::worker_lost);
  until_members(2);
  EXPECT_EQ(code_of(lose(2)), errc::worker_lost);
  auto alone = until_members(1);
  EXPECT_EQ(alone.members.front().rank, 1);
  auto ref = must(answer_of(w.device_of(1).allocate(dtype::float32, 8)));
  std::vector<any_gpu_ref> refs{{}, ref, {}};
  auto done = answer_of(w.all_reduce(refs, refs, reduce_op::sum, {.allow_shrunk = true}));
  ASSERT_TRUE(done) << describe(done.error());
  EXPECT_EQ(done->ranks, (std::vector<std::int32_t>{1}));
  EXPECT_EQ(code_of(lose(1)), errc::worker_lost);
  feed_->until([](const world_status& x) {
    return x.phase == world_phase::building && x.members.size() == 3;
  });
  auto late = answer_of(w.barrier({.deadline = 50ms}));
  EXPECT_EQ(code_of(error_of(late)), errc::deadline_exceeded) << describe(error_of(late));
  doors_->devices.open();
  until_members(3);
  EXPECT_TRUE(works(w));
}

/// A request after the loss is not part of it, even while others are still being notified.
TEST_F(LossPolicy, WhoComesAfterTheLossWaits) {
  TROUPE_NEEDS_DEVICES(2);
  auto& w = start(2, standby_policy::none);
  const auto before = until_members(2);
  doors_->devices.close();
  std::atomic<bool> told{false};
  std::promise<pending<collective_done>> late;
  const auto runtime = must(must(detail::system_core::of(system_->get()))->runtime());
  const auto listens = std::make_shared<int>(); // notified after the world itself
  runtime->watch_losses(listens, [&](int, const caf::error&) {
    if (!told.exchange(true))
      late.set_value(w.barrier({.deadline = 50ms}));
  });
  EXPECT_EQ(code_of(lose(1)), errc::worker_lost);
  const auto why = error_of(answer_of(late.get_future().get()));
  EXPECT_EQ(code_of(why), errc::deadline_exceeded) << describe(why);
  doors_->devices.open();
  until_members(2, before.epoch + 1);
  EXPECT_TRUE(works(w));
}

/// Keeps all actors of a system from running.
class held_actors {
public:
  explicit held_actors(test_system& system) {
    const auto inside = std::make_shared<std::atomic<std::size_t>>(0);
    const auto threads =
        caf::get_or(system.get().config(), "scheduler.max-threads", std::size_t{1});
    const auto gate = opened_.get_future().share();
    for (std::size_t i = 0; i < threads; ++i)
      system.get().spawn([gate, inside] {
        ++*inside;
        gate.wait();
      });
    EXPECT_TRUE(eventually([&] { return *inside == threads; }));
  }
  ~held_actors() { opened_.set_value(); }
  held_actors(const held_actors&) = delete;
  held_actors& operator=(const held_actors&) = delete;

private:
  std::promise<void> opened_;
};

/// The device may be back before the world's actor knows that it was lost.
TEST_F(LossPolicy, GoesOnWithASpareBeforeItsActorKnows) {
  TROUPE_NEEDS_DEVICES(2);
  auto& w = start(2, standby_policy::full);
  const auto before = until_prepared();
  auto held = std::make_optional<held_actors>(*system_);
  EXPECT_EQ(code_of(lose(1)), errc::worker_lost);
  EXPECT_TRUE(eventually([&] { return w.status().phase == world_phase::ready; }));
  EXPECT_TRUE(works(w));
  const auto now = w.status();
  EXPECT_EQ(now.membership, before.membership + 1);
  held.reset();
  feed_->until([&](const world_status& x) { // then the actor has heard of it all
    return x.membership >= now.membership && x.standby_ready;
  });
  EXPECT_EQ(w.status().epoch, now.epoch);
  EXPECT_EQ(w.status().membership, now.membership);
  EXPECT_TRUE(works(w));
}

/// The device may be lost while it is reset, and be back before the world's actor knows of the
/// reset.
TEST_F(LossPolicy, ALateReportOfAResetEndsNothingNewer) {
  TROUPE_NEEDS_DEVICES(2);
  auto& w = start(2, standby_policy::full);
  until_prepared();
  const auto d = w.device_of(1);
  const auto worker = must(answer_of(d.stats())).worker_pid;
  std::uint64_t epoch = 0;
  {
    const held_actors held{*system_};
    const auto reset = d.reset(); // waits for the communicator, which the actor ends
    ASSERT_EQ(::kill(static_cast<pid_t>(worker), SIGKILL), 0);
    ASSERT_TRUE(is_ok(answer_of(reset)));
    ASSERT_TRUE(eventually([&] { return w.status().phase == world_phase::ready; }));
    epoch = w.status().epoch;
    EXPECT_EQ(w.status().members[1].incarnation, 2u);
    EXPECT_TRUE(works(w));
  }
  feed_->until([&](const world_status& x) { return x.epoch >= epoch && x.standby_ready; });
  EXPECT_EQ(w.status().epoch, epoch);
  EXPECT_TRUE(works(w));
}

TEST_F(LossPolicy, FailoverHasSparesWithoutStandbys) {
  TROUPE_NEEDS_DEVICES(2);
  auto& w = start(2, standby_policy::spares);
  auto before = until_members(2);
  EXPECT_TRUE(works(w));
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(code_of(lose(i % 2)), errc::worker_lost);
    before = until_members(2, before.epoch + 1);
    EXPECT_TRUE(works(w));
  }
}

// A preparation for one loss is not used for another loss that happens meanwhile.
TEST_F(LossPolicy, ALossWhileSparesStartLeavesItsReasonAndIsPreparedForAgain) {
  TROUPE_NEEDS_DEVICES(2);
  doors_->spares.close();
  auto& w = start(2, standby_policy::spares);
  const auto before = until_members(2);
  ASSERT_TRUE(eventually([&] { return doors_->spares.reached() == 2; }));
  doors_->devices.close();
  EXPECT_EQ(code_of(lose(0)), errc::worker_lost);
  feed_->until(world_phase::building);
  doors_->spares.open();
  ASSERT_TRUE(eventually([&] { return doors_->devices.reached() == 3; }));
  EXPECT_EQ(code_of(w.status().reason), errc::worker_lost);
  doors_->devices.open();
  until_members(2, before.epoch + 1);
  EXPECT_TRUE(eventually([&] { return doors_->spares.reached() == 4; }));
  EXPECT_TRUE(works(w));
}

TEST_F(LossPolicy, AttemptsToComeBackDoNotEndWhatGoesOn) {
  TROUPE_NEEDS_DEVICES(3);
  auto& w = start(3, standby_policy::none, loss_policy::shrink);
  until_members(3);
  device_feed lives{*system_, system_->device_actor(1)};
  doors_->devices.close();
  EXPECT_EQ(code_of(lose(1)), errc::worker_lost);
  const auto small = until_members(2);
  doors_->refused[1] = 3;
  doors_->devices.open();
  EXPECT_EQ(lives.until(device_phase::ready, 2).incarnation, 2u);
  EXPECT_EQ(std::count_if(lives.seen().begin(), lives.seen().end(),
                          [](auto& x) { return code_of(x.reason) == errc::unavailable; }),
            3);
  EXPECT_EQ(until_members(3).epoch, small.epoch + 1);
  EXPECT_TRUE(works(w));
}

/// The world continues on this communicator if the survivors' communicator fails meanwhile. With
/// direct collectives there is a standby, too.
TEST_F(LossPolicy, WhatIsBuiltToGrowIsNotBuiltTwice) {
  TROUPE_HOST_ONLY("a call that fails");
  collectives_ = collectives_policy::nccl;
  faults_ = std::make_shared<fault_plan>();
  auto& w = start(3, standby_policy::none, loss_policy::shrink);
  until_members(3);
  doors_->devices.close();
  EXPECT_EQ(code_of(lose(1)), errc::worker_lost);
  const auto small = until_members(2);
  doors_->builds.close();
  doors_->devices.open();
  ASSERT_TRUE(eventually([&] { return doors_->builds.reached() == 3; }));
  faults_->add({.kind = fault::fail, .on = verb::collective, .device = 0});
  EXPECT_EQ(code_of(error_of(answer_of(w.barrier({.allow_shrunk = true})))), errc::nccl_error);
  feed_->until(world_phase::building);
  doors_->builds.open();
  EXPECT_EQ(until_members(3).epoch, small.epoch + 1);
  EXPECT_EQ(doors_->builds.reached(), 3);
  EXPECT_TRUE(works(w));
}

/// A device fails for good, before or after the loss of the other. The world does not wait for it.
class NeverComesBack : public LossPolicy, public ::testing::WithParamInterface<bool> {};

INSTANTIATE_TEST_SUITE_P(Before, NeverComesBack, ::testing::Bool(),
                         [](auto& x) { return x.param ? "TheOtherIsLost" : "TheOtherIsBack"; });

TEST_P(NeverComesBack, TheOthersGoOn) {
  TROUPE_NEEDS_DEVICES(2);
  auto& w = start(2, standby_policy::none, loss_policy::shrink);
  until_members(2);
  device_feed lives{*system_, system_->device_actor(0)};
  doors_->refused[0] = 1000;
  if (!GetParam())
    doors_->devices.close();
  EXPECT_EQ(code_of(lose(0)), errc::worker_lost);
  const auto alone = until_members(1);
  if (GetParam())
    lives.until(device_phase::failed);
  EXPECT_EQ(code_of(lose(1)), errc::worker_lost);
  doors_->devices.open();
  const auto again = until_members(1, alone.epoch + 1);
  EXPECT_EQ(again.members.front().rank, 1);
  EXPECT_EQ(again.members.front().incarnation, 2u);
  auto ref = must(answer_of(w.device_of(1).allocate(dtype::float32, 8)));
  std::vector<any_gpu_ref> refs{{}, ref};
  EXPECT_TRUE(is_ok(answer_of(w.all_reduce(refs, refs, reduce_op::sum, {.allow_shrunk = true}))));
  // A group of both devices is impossible. A group of the remaining one works.
  lives.until(device_phase::failed);
  EXPECT_TRUE(has_code(w.split("both", {0, 0}), errc::unavailable));
  EXPECT_TRUE(works(must(w.split("alone", {-1, 0})).front()));
  doors_->refused[1] = 1000;
  EXPECT_EQ(code_of(lose(1)), errc::worker_lost);
  EXPECT_EQ(code_of(feed_->until(world_phase::failed).reason), errc::unavailable);
}

// Each loss counts once, no matter how many notifications there are.
TEST_F(LossPolicy, LossesInEachBuildEndTheWorld) {
  TROUPE_NEEDS_DEVICES(2);
  constexpr int restarts = 3;
  collectives_ = collectives_policy::nccl; // its builds are held
  start(2, standby_policy::none, loss_policy::rebuild, restarts);
  until_members(2);
  doors_->builds.close();
  for (int i = 0; i < restarts; ++i) {
    EXPECT_EQ(code_of(lose(0)), errc::worker_lost);
    ASSERT_TRUE(eventually([&] { return doors_->builds.reached() == i + 2; })) << i;
    EXPECT_EQ(world_->status().phase, world_phase::building);
  }
  EXPECT_EQ(code_of(lose(0)), errc::worker_lost);
  EXPECT_EQ(code_of(feed_->until(world_phase::failed).reason), errc::worker_lost);
}

/// All losses at the end of a host count as one restart.
TEST_F(LossPolicy, LossesAtOnceAreOneRestart) {
  TROUPE_NEEDS_DEVICES(4);
  auto& w = start(4, standby_policy::none, loss_policy::rebuild, 2);
  const auto before = until_members(4);
  doors_->devices.close();
  std::vector<pending<void>> deaths;
  for (std::size_t i = 0; i < 4; ++i)
    deaths.push_back(launch_death(w.device_of(i)));
  for (auto& x : deaths)
    EXPECT_EQ(code_of(error_of(answer_of(x))), errc::worker_lost);
  doors_->devices.open();
  until_members(4, before.epoch + 1);
  EXPECT_TRUE(works(w));
}

/// A loss before the world was opened is not a loss of this world.
TEST_F(LossPolicy, AWorldOpenedWhileADeviceComesBackWaitsForIt) {
  TROUPE_NEEDS_DEVICES(2);
  start(2, standby_policy::none, loss_policy::rebuild);
  until_members(2);
  doors_->devices.close();
  EXPECT_EQ(code_of(lose(0)), errc::worker_lost);
  world_config config;
  config.limits.on_loss = loss_policy::fail;
  config.devices = {0, 1};
  config.name = "late";
  const auto late = must(spawn_nccl_world(*system_, config));
  world_feed feed{*system_, late};
  feed.until(world_phase::building);
  doors_->devices.open();
  feed.until([](const world_status& x) { return x.phase != world_phase::building; });
  EXPECT_EQ(feed.seen().back().phase, world_phase::ready) << describe(feed.seen().back().reason);
  detail::anon_send(late, shutdown{});
}

TEST_F(LossPolicy, FailEndsAWorldThatIsBeingBuilt) {
  TROUPE_NEEDS_DEVICES(2);
  collectives_ = collectives_policy::nccl; // its builds are held
  auto& w = start(2, standby_policy::none, loss_policy::fail);
  until_members(2);
  doors_->builds.close();
  EXPECT_TRUE(is_ok(answer_of(w.device_of(0).reset())));
  ASSERT_TRUE(eventually([&] { return doors_->builds.reached() == 2; }));
  EXPECT_EQ(code_of(lose(1)), errc::worker_lost);
  EXPECT_EQ(code_of(feed_->until(world_phase::failed).reason), errc::worker_lost);
}

TEST_F(LossPolicy, FailEndsTheWorld) {
  TROUPE_NEEDS_DEVICES(2);
  auto& w = start(2, standby_policy::none, loss_policy::fail);
  auto refs = must(w.allocate<float>(8));
  EXPECT_EQ(code_of(lose(1)), errc::worker_lost);
  auto failed = feed_->until(world_phase::failed);
  EXPECT_EQ(code_of(failed.reason), errc::worker_lost);
  EXPECT_EQ(code_of(error_of(answer_of(w.barrier()))), errc::unavailable);
}

struct policy_case {
  standby_policy standby;
  loss_policy on_loss;
};

class MeshInWorkers : public LossPolicy, public ::testing::WithParamInterface<policy_case> {};

INSTANTIATE_TEST_SUITE_P(
    With, MeshInWorkers,
    ::testing::Values(policy_case{standby_policy::spares, loss_policy::failover},
                      policy_case{standby_policy::full, loss_policy::failover},
                      policy_case{standby_policy::communicators, loss_policy::shrink},
                      policy_case{standby_policy::none, loss_policy::rebuild},
                      policy_case{standby_policy::none, loss_policy::fail}),
    [](auto& x) {
      return std::string{to_string(x.param.on_loss)} + "_" +
             std::string{to_string(x.param.standby)};
    });

// INV-7, INV-12: calls over host memory have the same end on all ranks, even if the world changes.
TEST_P(MeshInWorkers, CallsEndAlikeThroughLosses) {
  TROUPE_NEEDS_DEVICES(3);
  const auto [standby, on_loss] = GetParam();
  auto& w = start(3, standby, on_loss);
  const auto n = w.size();
  auto mesh = must(mesh_comm::open(w, {.groups = {}, .chunk_bytes = 4096}));
  std::atomic<bool> stop = false;
  std::atomic<int> right = 0;
  std::vector<std::vector<caf::error>> ends(n); // by rank, of its calls
  std::vector<std::atomic<bool>> failed(n);     // a call of the rank failed
  std::vector<std::thread> clients;
  for (std::size_t i = 0; i < n; ++i) // a thread that ends drops its handle
    clients.emplace_back([&, i, mine = std::move(mesh[i])] {
      for (std::int32_t k = 0; !stop; ++k) {
        numbers memory(k % 3 == 0 ? 5000 : 700, static_cast<std::int32_t>(i) + k);
        auto answer =
            answer_of(mine.all_reduce(std::as_writable_bytes(std::span{memory}), dtype::int32));
        ends[i].push_back(error_of(answer));
        if (!answer) {
          failed[i] = true;
          continue;
        }
        const auto sum = static_cast<std::int32_t>(n * (n - 1) / 2 + n * std::size_t(k));
        ASSERT_EQ(memory, numbers(memory.size(), sum)) << "call " << k;
        ++right;
      }
    });
  auto until_right = [&] {
    const auto wanted = right + 10;
    for (auto until = std::chrono::steady_clock::now() + patience;
         right < wanted && std::chrono::steady_clock::now() < until;)
      std::this_thread::yield();
    EXPECT_GE(right, wanted);
  };
  std::uint64_t epoch = 0;
  const auto losses = on_loss == loss_policy::fail ? 1 : 6;
  for (int i = 0; i < losses; ++i) {
    if (standby == standby_policy::communicators || standby == standby_policy::full)
      until_prepared();
    epoch = until_members(n, epoch).epoch + 1;
    until_right();
    EXPECT_EQ(code_of(lose(static_cast<std::size_t>(i) % n)), errc::worker_lost);
  }
  if (on_loss == loss_policy::fail) {
    feed_->until(world_phase::failed);
    EXPECT_TRUE(
        eventually([&] { return std::ranges::all_of(failed, [](auto& x) -> bool { return x; }); }));
  } else {
    until_members(n, epoch);
    until_right();
  }
  stop = true;
  for (auto& x : clients)
    x.join();
  std::map<std::string, int> codes;
  for (std::size_t k = 0; std::ranges::all_of(ends, [&](auto& x) { return k < x.size(); }); ++k) {
    auto& why = ends[0][k];
    for (auto& of_rank : ends)
      ASSERT_EQ(describe(of_rank[k]), describe(why)) << "call " << k;
    const auto code = code_of(why);
    ++codes[why ? std::string{to_string(code.value_or(errc::internal))} : "done"];
    EXPECT_TRUE(!why || code == errc::worker_lost || code == errc::unavailable ||
                (code == errc::membership_changed && on_loss == loss_policy::shrink))
        << describe(why);
  }
  EXPECT_GT(codes.size(), 1u); // some losses happened during calls
}

TEST_F(LossPolicy, RefusesWhatDoesNotFit) {
  start(2, standby_policy::none);
  auto refusal = [&](standby_policy standby, loss_policy on_loss) {
    world_config config;
    config.devices = system_->ordinals();
    config.limits.standby = standby;
    config.limits.on_loss = on_loss;
    return code_of(error_of(spawn_nccl_world(*system_, config)));
  };
  EXPECT_EQ(refusal(standby_policy::full, loss_policy::shrink), errc::invalid_argument);
  EXPECT_EQ(refusal(standby_policy::full, loss_policy::rebuild), errc::invalid_argument);
  EXPECT_EQ(refusal(standby_policy::spares, loss_policy::fail), errc::invalid_argument);
  EXPECT_EQ(refusal(standby_policy::communicators, loss_policy::failover), errc::invalid_argument);
  EXPECT_EQ(refusal(standby_policy::none, loss_policy::failover), errc::invalid_argument);
}

TEST(LossPolicyInProcess, HasNoSpares) {
  test_system system{{.devices = 2}};
  if (in_workers())
    GTEST_SKIP() << "about devices of this process";
  for (auto standby : {standby_policy::full, standby_policy::spares}) {
    world_config config;
    config.devices = system.ordinals();
    config.limits.standby = standby;
    EXPECT_EQ(code_of(error_of(spawn_nccl_world(system, config))), errc::not_supported);
  }
}

} // namespace

} // namespace troupe::testing
