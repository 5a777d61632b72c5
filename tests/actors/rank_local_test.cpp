/// Calls of single ranks from any thread, and how they form operations.
#include "support/collective_round.hpp"
#include "support/eventually.hpp"
#include <troupe/detail/caf_compat.hpp>

#include <caf/all.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace troupe {

namespace {

using namespace std::chrono_literals;
using testing::answer_of;
using testing::ask;
using testing::has_code;
using testing::holds;
using testing::is_ok;
using testing::must;
using testing::round_of;
using testing::test_system;

using answers = std::vector<pending<collective_done>>;

void expect_ok(const answers& all) {
  for (auto& x : all)
    EXPECT_TRUE(is_ok(answer_of(x)));
}

/// Accepts the bytes of all buffers, so that skipped requests leave no marks.
template <class Refs> void accept_all(const world& w, const Refs& refs) {
  for (std::size_t rank = 0; rank < w.size(); ++rank)
    testing::accept_bytes(w.device_of(rank), refs[rank]);
}

void expect_code(const answers& all, errc code) {
  for (auto& x : all)
    EXPECT_TRUE(has_code(answer_of(x), code));
}

/// Calls `f(rank)` in a thread for each rank.
void on_all_ranks(const world& w, const std::function<void(std::size_t)>& f) {
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < w.size(); ++rank)
    threads.emplace_back([&, rank] { f(rank); });
  for (auto& x : threads)
    x.join();
}

class RankLocal : public ::testing::TestWithParam<int> {};

TEST_P(RankLocal, IsRightForEveryKindAndType) {
  test_system system{{.devices = GetParam()}};
  if (system.devices() < GetParam())
    GTEST_SKIP() << "needs " << GetParam() << " devices";
  auto w = system.open_world({});
  std::vector<std::pair<std::string, round_of>> rounds;
  std::uint64_t seed = 0;
  for (auto kind : testing::round_kinds)
    for (auto type : real_dtypes) {
      ++seed;
      rounds.emplace_back(std::string{to_string(kind)} + " of " + std::string{to_string(type)},
                          round_of{w,
                                   {.what = kind,
                                    .type = type,
                                    .count = 1 + seed % 40,
                                    .root = static_cast<int>(seed % w.size()),
                                    .seed = seed}});
    }
  on_all_ranks(w, [&](std::size_t rank) {
    auto mine = w.rank(rank);
    answers all;
    for (auto& [name, round] : rounds)
      all.push_back(mine.run(round.request_of(rank)));
    for (std::size_t i = 0; i < all.size(); ++i)
      EXPECT_TRUE(is_ok(answer_of(all[i]))) << rounds[i].first << ", rank " << rank;
  });
  for (auto& [name, round] : rounds)
    round.expect_right();
}

// A rank's result does not wait for lanes of other ranks that have not polled their part yet.
TEST_P(RankLocal, IsAnsweredWhenItsOwnPartIsDone) {
  test_system system{{.devices = GetParam()}};
  if (system.devices() < GetParam() || GetParam() < 2)
    GTEST_SKIP() << "needs " << std::max(2, GetParam()) << " devices";
  auto w = system.open_world({});
  auto refs = must(w.allocate<std::int32_t>(8));
  for (std::size_t rank = 0; rank < w.size(); ++rank)
    must(answer_of(w.device_of(rank).fill(refs[rank], static_cast<std::int32_t>(rank + 1))));
  const auto sum = static_cast<std::int32_t>(w.size() * (w.size() + 1) / 2);
  testing::gate before;
  testing::gate behind; // the lane has issued the sum, but not polled it, when it blocks here
  auto late = w.device_of(1);
  auto first = before.hold_lane(late);
  ASSERT_TRUE(before.wait_reached());
  answers all;
  for (std::size_t rank = 0; rank < w.size(); ++rank)
    all.push_back(w.rank(rank).all_reduce(refs[rank]));
  auto second = behind.hold_lane(late);
  before.open();
  ASSERT_TRUE(behind.wait_reached());
  for (std::size_t rank = 0; rank < w.size(); ++rank)
    if (rank != 1) {
      EXPECT_TRUE(is_ok(answer_of(all[rank])));
      EXPECT_TRUE(holds(w.device_of(rank), refs[rank], std::vector<std::int32_t>(8, sum)));
    }
  EXPECT_FALSE(all[1].ready());
  behind.open();
  EXPECT_TRUE(is_ok(answer_of(all[1])));
  EXPECT_TRUE(holds(late, refs[1], std::vector<std::int32_t>(8, sum)));
  EXPECT_TRUE(is_ok(answer_of(first)) && is_ok(answer_of(second)));
}

TEST(RankCallsWithFaults, WhatIsDoneStaysRightWhenAnotherRankFails) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan = std::make_shared<testing::fault_plan>();
  test_system system{{.devices = 2, .faults = plan}};
  auto w = system.open_world({});
  testing::world_feed feed{system, w.actor()};
  auto refs = must(w.allocate<std::int32_t>(8));
  for (std::size_t rank = 0; rank < 2; ++rank)
    must(answer_of(w.device_of(rank).fill(refs[rank], static_cast<std::int32_t>(rank + 1))));
  plan->add({testing::fault::fail, testing::verb::asynchronous_error, 1});
  testing::gate before;
  testing::gate behind;
  auto first = before.hold_lane(w.device_of(1));
  ASSERT_TRUE(before.wait_reached());
  auto done = w.rank(0).all_reduce(refs[0]);
  auto lost = w.rank(1).all_reduce(refs[1]);
  auto second = behind.hold_lane(w.device_of(1));
  before.open();
  ASSERT_TRUE(behind.wait_reached());
  EXPECT_TRUE(is_ok(answer_of(done)));
  behind.open();
  EXPECT_TRUE(has_code(answer_of(lost), errc::nccl_error));
  feed.until(world_phase::ready, 2);
  EXPECT_TRUE(holds(w.device_of(0), refs[0], std::vector<std::int32_t>(8, 3)));
  EXPECT_TRUE(has_code(testing::get(w.device_of(1), refs[1]), errc::indeterminate));
  EXPECT_TRUE(is_ok(answer_of(first)) && is_ok(answer_of(second)));
}

INSTANTIATE_TEST_SUITE_P(Ranks, RankLocal, ::testing::Values(1, 2, 3, 4, 8));

class RankCalls : public ::testing::Test {
protected:
  explicit RankCalls(world_limits limits = {})
      : w(system.open_world({.devices = {}, .name = "world", .limits = limits})) {}

  round_of round(collective_kind kind, int root = 0) const {
    return {w, {.what = kind, .type = dtype::int32, .count = 16, .root = root, .seed = 7}};
  }
  std::size_t last() const { return w.size() - 1; }
  template <class F> answers on_each(F f) const {
    answers all;
    for (std::size_t rank = 0; rank < w.size(); ++rank)
      all.push_back(f(w.rank(rank), rank));
    return all;
  }
  /// Makes the calls of all ranks but the first.
  answers all_reduce_of_the_rest(const std::vector<gpu_ref<std::int32_t>>& refs) const {
    answers all;
    for (std::size_t rank = 1; rank < w.size(); ++rank)
      all.push_back(w.rank(rank).all_reduce(refs[rank]));
    return all;
  }
  std::vector<gpu_ref<std::int32_t>> numbers(std::size_t count = 8) const {
    auto refs = must(w.allocate<std::int32_t>(count));
    for (std::size_t rank = 0; rank < w.size(); ++rank)
      must(answer_of(w.device_of(rank).fill(refs[rank], static_cast<std::int32_t>(rank + 1))));
    return refs;
  }
  std::int32_t sum() const {
    auto n = static_cast<std::int32_t>(w.size());
    return n * (n + 1) / 2;
  }
  ::testing::AssertionResult all_hold(const std::vector<gpu_ref<std::int32_t>>& refs,
                                      std::int32_t want) const {
    for (std::size_t rank = 0; rank < w.size(); ++rank)
      if (auto found = holds(w.device_of(rank), refs[rank],
                             std::vector<std::int32_t>(refs[rank].count(), want));
          !found)
        return found;
    return ::testing::AssertionSuccess();
  }

  test_system system{{.devices = 3}};
  world w;
};

TEST_F(RankCalls, HaveAllVerbs) {
  auto check = [&](const round_of& x, auto verb) {
    expect_ok(on_each(verb));
    x.expect_right();
  };
  auto root = static_cast<int>(last());
  auto at_root = [&](std::size_t rank, const std::vector<any_gpu_ref>& refs) {
    return rank == last() ? refs[rank] : any_gpu_ref{};
  };
  auto a = round(collective_kind::all_reduce);
  check(a, [&](world_rank r, std::size_t i) { return r.all_reduce(a.send()[i], a.recv()[i]); });
  auto b = round(collective_kind::reduce, root);
  check(b, [&](world_rank r, std::size_t i) {
    return r.reduce(b.send()[i], at_root(i, b.recv()), root);
  });
  auto c = round(collective_kind::broadcast, root);
  check(c, [&](world_rank r, std::size_t i) {
    return r.broadcast(at_root(i, c.send()), c.recv()[i], root);
  });
  auto d = round(collective_kind::all_gather);
  check(d, [&](world_rank r, std::size_t i) { return r.all_gather(d.send()[i], d.recv()[i]); });
  auto e = round(collective_kind::reduce_scatter);
  check(e, [&](world_rank r, std::size_t i) { return r.reduce_scatter(e.send()[i], e.recv()[i]); });
  auto f = round(collective_kind::all_to_all);
  check(f, [&](world_rank r, std::size_t i) { return r.all_to_all(f.send()[i], f.recv()[i]); });
  auto g = round(collective_kind::all_to_all_v);
  check(g, [&](world_rank r, std::size_t i) {
    auto counts = g.request_of(i).counts;
    return r.all_to_all_v(g.send()[i], counts[0], g.recv()[i], counts[1]);
  });
  auto h = round(collective_kind::gather, root);
  check(h, [&](world_rank r, std::size_t i) {
    return r.gather(h.send()[i], at_root(i, h.recv()), root);
  });
  auto j = round(collective_kind::scatter, root);
  check(j, [&](world_rank r, std::size_t i) {
    return r.scatter(at_root(i, j.send()), j.recv()[i], root);
  });
  expect_ok(on_each([](world_rank r, std::size_t) { return r.barrier(); }));
}

TEST_F(RankCalls, InPlace) {
  auto x = numbers();
  expect_ok(on_each([&](world_rank r, std::size_t i) { return r.all_reduce(x[i]); }));
  EXPECT_TRUE(all_hold(x, sum()));
  expect_ok(on_each([&](world_rank r, std::size_t i) {
    return r.reduce(x[i], i == 0 ? x[i].any() : any_gpu_ref{}, 0, reduce_op::max);
  }));
  must(answer_of(w.device_of(0).fill(x[0], 5)));
  expect_ok(on_each([&](world_rank r, std::size_t i) { return r.broadcast(x[i], 0); }));
  EXPECT_TRUE(all_hold(x, 5));
  auto n = w.size();
  auto y = numbers(2 * n);
  expect_ok(on_each([&](world_rank r, std::size_t i) { return r.all_gather(y[i]); }));
  std::vector<std::int32_t> want;
  for (std::size_t q = 0; q < n; ++q)
    want.insert(want.end(), 2, static_cast<std::int32_t>(q + 1));
  for (std::size_t rank = 0; rank < n; ++rank)
    EXPECT_TRUE(holds(w.device_of(rank), y[rank], want));
  expect_ok(on_each([&](world_rank r, std::size_t i) { return r.reduce_scatter(y[i]); }));
  for (std::size_t rank = 0; rank < n; ++rank)
    EXPECT_TRUE(holds(w.device_of(rank), must(y[rank].slice(2 * rank, 2)),
                      std::vector<std::int32_t>(2, static_cast<std::int32_t>(n * (rank + 1)))));
}

// A call has its position among all work on its buffers from its own time, not the last rank's.
TEST_F(RankCalls, KeepTheirPlace) {
  TROUPE_NEEDS_DEVICES(2);
  auto x = numbers();
  auto device = w.device_of(0);
  auto first = w.rank(0).all_reduce(x[0]);
  auto after = must(device.allocate<std::int32_t>(x[0].count()));
  auto copied = device.copy(after, x[0]);
  auto overwritten = device.fill(x[0], -1);
  EXPECT_FALSE(copied.ready());
  EXPECT_FALSE(overwritten.ready());
  // An independent operation passes the waiting one.
  auto other = numbers();
  EXPECT_TRUE(is_ok(answer_of(w.all_reduce(other))));
  EXPECT_FALSE(first.ready());
  auto rest = all_reduce_of_the_rest(x);
  expect_ok(rest);
  EXPECT_TRUE(is_ok(answer_of(first)));
  EXPECT_TRUE(is_ok(answer_of(copied)));
  EXPECT_TRUE(is_ok(answer_of(overwritten)));
  EXPECT_TRUE(holds(device, after, std::vector<std::int32_t>(x[0].count(), sum())));
  EXPECT_TRUE(holds(device, x[0], std::vector<std::int32_t>(x[0].count(), -1)));
}

// Ranks far ahead, whole operations in between, and messages: all in the order of each rank.
TEST_F(RankCalls, OfManyThreads) {
  constexpr int rounds = 150;
  auto x = numbers();
  auto whole = numbers();
  std::thread client{[&] {
    for (int i = 0; i < rounds; ++i)
      EXPECT_TRUE(is_ok(answer_of(w.all_reduce(whole, reduce_op::max))));
  }};
  on_all_ranks(w, [&](std::size_t rank) {
    auto r = w.rank(rank);
    auto n = static_cast<int>(w.size());
    auto next = (r.index() + 1) % n;
    auto before = (r.index() + n - 1) % n;
    auto in = must(r.where().allocate<std::int32_t>(x[rank].count()));
    std::mt19937 random{static_cast<std::uint32_t>(rank)};
    answers all;
    for (int i = 0; i < rounds; ++i) {
      // The largest number travels around the ring.
      all.push_back(r.send(x[rank], next));
      all.push_back(r.recv(in, before));
      all.push_back(r.all_reduce(in, x[rank], reduce_op::max));
      if (random() % 8 == 0) {
        EXPECT_TRUE(is_ok(answer_of(all.back())));
      }
    }
    expect_ok(all);
  });
  client.join();
  EXPECT_TRUE(all_hold(x, static_cast<std::int32_t>(w.size())));
  EXPECT_TRUE(all_hold(whole, static_cast<std::int32_t>(w.size())));
}

TEST_F(RankCalls, ThatDifferAreNamed) {
  TROUPE_NEEDS_DEVICES(2);
  auto x = numbers();
  auto floats = must(w.allocate<float>(8));
  auto expect_mismatch = [&](const std::string& what, auto odd) {
    answers all{w.rank(0).all_reduce(x[0])};
    all.push_back(odd(w.rank(1)));
    for (std::size_t rank = 2; rank < w.size(); ++rank)
      all.push_back(w.rank(rank).all_reduce(x[rank])); // too late: the operation has failed
    for (auto& a : all) {
      auto got = answer_of(a);
      ASSERT_TRUE(has_code(got, errc::collective_mismatch)) << what;
      auto why = *failure_of(got.error());
      EXPECT_EQ(why.rank, 1) << what;
      EXPECT_NE(why.detail.find(what), std::string::npos) << why.detail;
    }
    EXPECT_TRUE(has_code(x[0].access(), errc::skipped)) << what;
    accept_all(w, x);
    accept_all(w, floats);
  };
  expect_mismatch("broadcast", [&](world_rank r) { return r.broadcast(x[1], 0); });
  expect_mismatch("float32", [&](world_rank r) { return r.all_reduce(floats[1]); });
  expect_mismatch("3 elements", [&](world_rank r) { return r.all_reduce(must(x[1].slice(0, 3))); });
  expect_mismatch("max", [&](world_rank r) { return r.all_reduce(x[1], reduce_op::max); });
  expect_mismatch("barrier", [&](world_rank r) { return r.barrier(); });
  auto roots =
      on_each([&](world_rank r, std::size_t i) { return r.broadcast(x[i], i == 0 ? 0 : 1); });
  expect_code(roots, errc::collective_mismatch);
  accept_all(w, x);
  // Nothing ran, and no rank is behind the others.
  expect_ok(on_each([&](world_rank r, std::size_t i) { return r.all_reduce(x[i]); }));
  EXPECT_TRUE(all_hold(x, sum()));
}

TEST_F(RankCalls, OfAllToAllVMustAgreeOnCounts) {
  TROUPE_NEEDS_DEVICES(2);
  auto x = round(collective_kind::all_to_all_v);
  auto calls = on_each([&](world_rank r, std::size_t i) {
    auto call = x.request_of(i);
    if (i == 1) {
      call.recv[0] = must(answer_of(r.where().allocate(dtype::int32, call.recv[0].count() + 1)));
      ++call.counts[1][0];
    }
    return r.run(call);
  });
  expect_code(calls, errc::collective_mismatch);
}

TEST_F(RankCalls, TakenBackEndForAll) {
  TROUPE_NEEDS_DEVICES(2);
  auto x = numbers();
  auto first = w.rank(0).all_reduce(x[0]);
  first.cancel();
  EXPECT_TRUE(has_code(answer_of(first), errc::cancelled));
  auto late = all_reduce_of_the_rest(x);
  expect_code(late, errc::cancelled);
  EXPECT_EQ(failure_of(answer_of(late[0]).error())->rank, 0);

  auto hasty = w.rank(0).all_reduce(x[0], reduce_op::sum, {.deadline = 20ms});
  auto got = answer_of(hasty);
  ASSERT_TRUE(has_code(got, errc::deadline_exceeded));
  EXPECT_NE(describe(got.error()).find("not called by rank 1"), std::string::npos)
      << describe(got.error());
  late = all_reduce_of_the_rest(x);
  expect_code(late, errc::deadline_exceeded);
  for (auto& ref : x) // the cancelled call leaves no mark
    EXPECT_TRUE(has_code(ref.access(), errc::skipped));
  accept_all(w, x);

  expect_ok(on_each([&](world_rank r, std::size_t i) { return r.all_reduce(x[i]); }));
  EXPECT_TRUE(all_hold(x, sum()));
}

// An operation that was cancelled behind some ranks' calls does not block the other ranks' calls.
// Operations behind it are not blocked either.
TEST_F(RankCalls, DoNotWaitForWhatWasTakenBackBehindThem) {
  TROUPE_NEEDS_DEVICES(2);
  auto x = numbers();
  auto y = numbers();
  auto first = w.rank(0).all_reduce(x[0]);
  auto whole = w.all_reduce(x);
  whole.cancel();
  EXPECT_TRUE(has_code(answer_of(whole), errc::cancelled));
  auto late = w.all_reduce(x, reduce_op::sum, {.deadline = 1ms});
  EXPECT_TRUE(has_code(answer_of(late), errc::deadline_exceeded));
  std::vector<pending<void>> accepted; // behind the first call
  for (std::size_t rank = 0; rank < w.size(); ++rank)
    accepted.push_back(w.device_of(rank).accept(x[rank]));
  auto between = w.all_reduce(x, y);
  auto behind = w.rank(0).where().fill(y[0], 3);
  between.cancel();
  EXPECT_TRUE(has_code(answer_of(between), errc::cancelled));
  EXPECT_TRUE(is_ok(answer_of(behind)));
  auto rest = all_reduce_of_the_rest(x);
  expect_ok(rest);
  EXPECT_TRUE(is_ok(answer_of(first)));
  for (auto& done : accepted)
    EXPECT_TRUE(is_ok(answer_of(done)));
  EXPECT_TRUE(all_hold(x, sum()));
}

// Without the cancelled one, they would wait for each other in a cycle. Each completes in time.
TEST_F(RankCalls, FollowWhatCameBehindWhatWasTakenBack) {
  TROUPE_NEEDS_DEVICES(2);
  auto x = numbers();
  auto y = numbers();
  testing::gate before;
  auto held = before.hold_lane(w.device_of(1));
  ASSERT_TRUE(before.wait_reached());
  auto first = w.rank(0).all_reduce(x[0], y[0]);
  auto whole = w.all_reduce(x, y);
  auto behind = w.device_of(1).fill(y[1], 3);
  whole.cancel();
  answers rest;
  for (std::size_t rank = 1; rank < w.size(); ++rank)
    rest.push_back(w.rank(rank).all_reduce(x[rank], y[rank]));
  before.open();
  EXPECT_TRUE(is_ok(answer_of(behind)));
  expect_ok(rest);
  EXPECT_TRUE(is_ok(answer_of(first)));
  EXPECT_TRUE(all_hold(y, sum()));
}

// The same at random. Downloads check the ranks' content in between.
TEST_F(RankCalls, AreRightAmongWhatIsTakenBack) {
  TROUPE_NEEDS_DEVICES(2);
  constexpr int calls = 8; // per rank
  std::vector<std::vector<gpu_ref<std::int32_t>>> rows;
  for (int i = 0; i < 3; ++i)
    rows.push_back(numbers());
  auto scratch = numbers();
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random{seed};
    auto any = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
    struct look {
      std::vector<std::int32_t> got;
      std::int32_t wanted;
    };
    std::deque<look> looks;
    answers all;
    std::vector<pending<void>> others;
    std::vector<std::vector<std::int32_t>> held(w.size());
    for (std::size_t rank = 0; rank < w.size(); ++rank)
      for (auto& row : rows) {
        held[rank].push_back(static_cast<std::int32_t>(rank + 1));
        others.push_back(w.device_of(rank).fill(row[rank], held[rank].back()));
      }
    std::vector<std::size_t> of_call;
    for (int i = 0; i < calls; ++i)
      of_call.push_back(any(rows.size()));
    std::vector<std::int32_t> after; // the sum of each call
    {
      auto now = held;
      for (auto row : of_call) {
        std::int32_t sum = 0;
        for (auto& x : now)
          sum += x[row];
        for (auto& x : now)
          x[row] = sum;
        after.push_back(sum);
      }
    }
    std::vector<std::size_t> made(w.size());
    std::vector<pending<collective_done>> doomed;
    for (auto left = w.size() * of_call.size(); left != 0;) {
      auto [least, most] = std::minmax_element(made.begin(), made.end());
      for (auto n = any(4); n > 0; --n) {
        doomed.push_back(w.all_reduce(rows[any(rows.size())], scratch));
        if (*least != *most && any(2) == 0) // behind the calls of some ranks
          doomed.push_back(w.all_reduce(rows[of_call[*least]]));
        if (any(3) == 0)
          others.push_back(w.device_of(0).fill(scratch[0], 0));
      }
      std::shuffle(doomed.begin(), doomed.end(), random);
      for (auto& x : doomed)
        x.cancel();
      doomed.clear();
      auto rank = any(w.size());
      if (made[rank] == of_call.size())
        continue;
      auto call = made[rank]++;
      auto row = of_call[call];
      all.push_back(w.rank(rank).all_reduce(rows[row][rank]));
      held[rank][row] = after[call];
      --left;
      auto from = any(rows.size());
      if (any(2) == 0) {
        auto& x = looks.emplace_back(look{std::vector<std::int32_t>(8), held[rank][from]});
        others.push_back(w.device_of(rank).download(rows[from][rank], x.got));
      }
    }
    for (auto& x : all)
      ASSERT_TRUE(is_ok(answer_of(x))) << "seed " << seed;
    for (auto& x : others)
      ASSERT_TRUE(is_ok(answer_of(x))) << "seed " << seed;
    for (auto& x : looks)
      ASSERT_EQ(x.got, std::vector<std::int32_t>(8, x.wanted)) << "seed " << seed;
  }
}

TEST_F(RankCalls, ThatAreWrongDoNotCount) {
  TROUPE_NEEDS_DEVICES(2);
  auto x = numbers();
  auto first = w.rank(0).all_reduce(x[0]);
  auto r = w.rank(1);
  EXPECT_TRUE(has_code(answer_of(r.all_reduce(x[0])), errc::invalid_argument));
  EXPECT_TRUE(has_code(answer_of(r.all_reduce(any_gpu_ref{})), errc::invalid_argument));
  // A handle without memory counts as no handle.
  const std::vector<std::uint64_t> nothing(w.size());
  EXPECT_TRUE(
      has_code(answer_of(r.all_to_all_v({}, nothing, x[1], nothing)), errc::invalid_argument));
  EXPECT_TRUE(has_code(answer_of(r.broadcast(x[1], 17)), errc::invalid_argument));
  EXPECT_TRUE(has_code(answer_of(r.send(x[1], 17)), errc::invalid_argument));
  EXPECT_TRUE(
      has_code(answer_of(r.all_reduce(x[1], reduce_op::sum, {.deadline = {}, .membership = 77})),
               errc::membership_changed));
  EXPECT_TRUE(
      has_code(answer_of(r.barrier({.deadline = {}, .membership = 77})), errc::membership_changed));
  EXPECT_TRUE(has_code(x[1].access(), errc::skipped));
  testing::accept_bytes(w.device_of(1), x[1]);
  EXPECT_FALSE(first.ready());
  auto rest = all_reduce_of_the_rest(x);
  expect_ok(rest);
  EXPECT_TRUE(is_ok(answer_of(first)));
  EXPECT_TRUE(all_hold(x, sum()));
}

TEST_F(RankCalls, SendToEachOther) {
  TROUPE_NEEDS_DEVICES(2);
  auto x = numbers(4);
  auto in = numbers(4);
  // Both ranks send first, in messages of different sizes: the k-th send matches the k-th recv.
  answers all;
  for (std::size_t rank : {0, 1}) {
    auto r = w.rank(rank);
    auto other = 1 - r.index();
    all.push_back(r.send(must(x[rank].slice(0, 1)), other));
    all.push_back(r.send(x[rank], other));
    all.push_back(r.recv(must(in[rank].slice(0, 1)), other));
    all.push_back(r.recv(in[rank], other));
  }
  expect_ok(all);
  EXPECT_TRUE(holds(w.device_of(0), in[0], std::vector<std::int32_t>(4, 2)));
  EXPECT_TRUE(holds(w.device_of(1), in[1], std::vector<std::int32_t>(4, 1)));
  // A rank sends to itself.
  auto r = w.rank(0);
  auto own = r.send(x[0], 0);
  EXPECT_FALSE(own.ready());
  EXPECT_TRUE(has_code(answer_of(r.recv(x[0], 0)), errc::invalid_argument));
  auto accepted = w.device_of(0).accept(x[0]); // behind the send
  EXPECT_TRUE(is_ok(answer_of(r.recv(in[0], 0))));
  EXPECT_TRUE(is_ok(answer_of(own)));
  EXPECT_TRUE(is_ok(answer_of(accepted)));
  EXPECT_TRUE(holds(w.device_of(0), in[0], std::vector<std::int32_t>(4, 1)));
  // The two sizes differ.
  auto sent = w.rank(0).send(x[0], 1);
  EXPECT_TRUE(
      has_code(answer_of(w.rank(1).recv(must(in[1].slice(0, 2)), 0)), errc::collective_mismatch));
  EXPECT_TRUE(has_code(answer_of(sent), errc::collective_mismatch));
}

// An operation that began first may depend on later ones that wait for each other.
TEST_F(RankCalls, ThatJoinLateFollowWhatIsBeforeThem) {
  TROUPE_NEEDS_DEVICES(3);
  auto x = numbers();
  auto y = numbers();
  answers all{w.rank(0).all_reduce(x[0])};
  all.push_back(w.rank(1).recv(x[1], 2));
  all.push_back(w.rank(1).send(x[1], 0)); // sends the data that it receives
  all.push_back(w.rank(0).recv(y[0], 1));
  all.push_back(w.rank(1).all_reduce(x[1]));
  all.push_back(w.rank(2).all_reduce(x[2]));
  for (auto& a : all)
    EXPECT_FALSE(a.ready());
  all.push_back(w.rank(2).send(y[2], 1));
  expect_ok(all);
  EXPECT_TRUE(all_hold(x, 1 + 3 + 3));
}

// Each rank sends the data that it receives: no operation could begin.
TEST_F(RankCalls, ThatWaitForEachOtherAreFound) {
  TROUPE_NEEDS_DEVICES(2);
  auto x = numbers();
  answers all{w.rank(0).recv(x[0], 1), w.rank(0).send(x[0], 1), w.rank(1).recv(x[1], 0),
              w.rank(1).send(x[1], 0)};
  expect_code(all, errc::collective_mismatch);
  x = numbers();
  expect_ok(on_each([&](world_rank r, std::size_t i) { return r.all_reduce(x[i]); }));
  EXPECT_TRUE(all_hold(x, sum()));
}

// All ranks send their data in both directions of a ring, and one to itself, at the same time.
TEST_F(RankCalls, ExchangeMessages) {
  constexpr std::size_t count = 1 << 18; // more than is buffered on the way
  const auto n = static_cast<int>(w.size());
  auto x = numbers(count);
  auto from_before = must(w.allocate<std::int32_t>(count));
  auto from_next = must(w.allocate<std::int32_t>(count));
  auto own = must(w.allocate<std::int32_t>(count));
  on_all_ranks(w, [&](std::size_t rank) {
    auto r = w.rank(rank);
    const auto next = (r.index() + 1) % n;
    const auto before = (r.index() + n - 1) % n;
    // With two ranks, next and previous rank are the same: the k-th send matches the k-th recv.
    auto done = answer_of(
        r.exchange({{next, x[rank]}, {before, x[rank]}, {r.index(), x[rank]}},
                   {{before, from_before[rank]}, {next, from_next[rank]}, {r.index(), own[rank]}}));
    EXPECT_TRUE(is_ok(done));
    if (done) {
      EXPECT_EQ(done->epoch, w.status().epoch);
    }
  });
  for (std::size_t rank = 0; rank < w.size(); ++rank) {
    const auto all_of = [](std::size_t of) {
      return std::vector<std::int32_t>(count, static_cast<std::int32_t>(of + 1));
    };
    auto d = w.device_of(rank);
    EXPECT_TRUE(holds(d, from_before[rank], all_of((rank + w.size() - 1) % w.size())));
    EXPECT_TRUE(holds(d, from_next[rank], all_of((rank + 1) % w.size())));
    EXPECT_TRUE(holds(d, own[rank], all_of(rank)));
  }
}

TEST_F(RankCalls, ExchangeWithWhoSendsAndReceivesOneByOne) {
  TROUPE_NEEDS_DEVICES(2);
  auto x = numbers();
  auto in = numbers();
  auto both = w.rank(0).exchange({{1, x[0]}}, {{1, in[0]}});
  answers one_by_one{w.rank(1).send(x[1], 0)};
  expect_ok(one_by_one);
  EXPECT_FALSE(both.ready());
  expect_ok({w.rank(1).recv(in[1], 0), both});
  EXPECT_TRUE(holds(w.device_of(0), in[0], std::vector<std::int32_t>(8, 2)));
  EXPECT_TRUE(holds(w.device_of(1), in[1], std::vector<std::int32_t>(8, 1)));
  // The same by a message to the world.
  auto late = w.rank(1).exchange({{0, in[1]}}, {{0, x[1]}});
  EXPECT_TRUE(is_ok(
      ask<collective_done>(system, w.actor(), troupe::exchange{0, {{1, in[0]}}, {{1, x[0]}}, {}})));
  EXPECT_TRUE(is_ok(answer_of(late)));
  EXPECT_TRUE(holds(w.device_of(0), x[0], std::vector<std::int32_t>(8, 1)));
  EXPECT_TRUE(holds(w.device_of(1), x[1], std::vector<std::int32_t>(8, 2)));
}

// A rank without neighbours has no messages in a step: its call does not count and does not wait.
TEST_F(RankCalls, ExchangeOfNothingIsDoneAtOnce) {
  TROUPE_NEEDS_DEVICES(2);
  auto x = numbers();
  const auto status = w.status();
  auto waits = w.rank(0).exchange({{1, x[0]}}, {});
  for (int i = 0; i < 3; ++i) {
    auto nothing = w.rank(0).exchange({}, {});
    ASSERT_TRUE(nothing.ready());
    const auto done = answer_of(nothing);
    ASSERT_TRUE(is_ok(done));
    EXPECT_EQ(done->epoch, status.epoch);
    EXPECT_EQ(done->membership, status.membership);
    EXPECT_EQ(done->operation, nothing.number());
    EXPECT_TRUE(done->ranks.empty());
  }
  EXPECT_TRUE(is_ok(ask<collective_done>(system, w.actor(), troupe::exchange{1, {}, {}, {}})));
  EXPECT_FALSE(waits.ready());
  expect_ok({w.rank(1).recv(x[1], 0), waits});
  x = numbers();
  expect_ok(on_each([&](world_rank r, std::size_t i) { return r.all_reduce(x[i]); }));
  EXPECT_TRUE(all_hold(x, sum()));
  // Errors for which other empty requests are refused too.
  const request_options another{.deadline = {}, .membership = 77};
  EXPECT_TRUE(has_code(answer_of(w.rank(0).exchange({}, {}, another)), errc::membership_changed));
  EXPECT_TRUE(
      has_code(answer_of(w.rank(0).exchange({}, {}, {.deadline = -1ns})), errc::deadline_exceeded));
  EXPECT_TRUE(has_code(answer_of(w.rank(w.size()).exchange({}, {})), errc::invalid_argument));
  EXPECT_TRUE(has_code(answer_of(w.run(group{{}, another})), errc::membership_changed));
  detail::anon_send(w.actor(), shutdown{});
  EXPECT_TRUE(has_code(answer_of(w.rank(0).all_reduce(x[0])), errc::unavailable));
  EXPECT_TRUE(has_code(answer_of(w.rank(0).exchange({}, {})), errc::unavailable));
  EXPECT_TRUE(has_code(answer_of(w.run(group{})), errc::unavailable));
}

TEST_F(RankCalls, ExchangeAllOrEndTogether) {
  TROUPE_NEEDS_DEVICES(3);
  auto x = numbers();
  auto y = numbers();
  auto begin = [&] { return w.rank(0).exchange({{1, x[0]}, {2, y[0]}}, {}); };
  auto both = begin();
  auto behind = w.device_of(0).fill(y[0], 9); // when no message reads it any more
  EXPECT_TRUE(
      has_code(answer_of(w.rank(1).recv(must(x[1].slice(0, 2)), 0)), errc::collective_mismatch));
  EXPECT_TRUE(has_code(answer_of(both), errc::collective_mismatch));
  EXPECT_TRUE(is_ok(answer_of(behind)));
  auto got = answer_of(w.rank(2).recv(y[2], 0));
  ASSERT_TRUE(has_code(got, errc::cancelled));
  EXPECT_EQ(failure_of(got.error())->rank, 0);
  EXPECT_NE(describe(got.error()).find("2 elements"), std::string::npos) << describe(got.error());

  auto taken_back = begin();
  taken_back.cancel();
  EXPECT_TRUE(has_code(answer_of(taken_back), errc::cancelled));
  expect_code({w.rank(1).recv(x[1], 0), w.rank(2).recv(y[2], 0)}, errc::cancelled);

  auto hasty = w.rank(0).exchange({{1, x[0]}, {2, y[0]}}, {}, {.deadline = 300ms});
  expect_ok({w.rank(1).recv(x[1], 0)});
  got = answer_of(hasty);
  ASSERT_TRUE(has_code(got, errc::deadline_exceeded));
  EXPECT_NE(describe(got.error()).find("not called by rank 2"), std::string::npos)
      << describe(got.error());
  expect_code({w.rank(2).recv(y[2], 0)}, errc::deadline_exceeded);

  // No rank is behind the others.
  both = begin();
  expect_ok({w.rank(2).recv(y[2], 0), w.rank(1).recv(x[1], 0), both});
  EXPECT_TRUE(holds(w.device_of(1), x[1], std::vector<std::int32_t>(8, 1)));
  EXPECT_TRUE(holds(w.device_of(2), y[2], std::vector<std::int32_t>(8, 9)));
}

// A program that ignores its results never combines data of different steps.
TEST_F(RankCalls, ThatAreRefusedLeaveAllInStep) {
  TROUPE_NEEDS_DEVICES(2);
  constexpr std::int32_t steps = 8;
  constexpr std::int32_t refused = 3;
  for (bool last_first : {false, true}) {
    std::vector<std::vector<gpu_ref<std::int32_t>>> x; // by step and rank
    std::vector<answers> all(steps);
    for (std::int32_t step = 0; step < steps; ++step) {
      x.push_back(numbers());
      for (std::size_t rank = 0; rank < w.size(); ++rank)
        must(answer_of(w.device_of(rank).fill(x.back()[rank], step)));
    }
    auto call_all_of = [&](std::size_t rank) {
      for (std::int32_t step = 0; step < steps; ++step) {
        request_options options;
        if (rank == 0 && step == refused)
          options.deadline = -1ns;
        all[static_cast<std::size_t>(step)].push_back(w.rank(rank).all_reduce(
            x[static_cast<std::size_t>(step)][rank], reduce_op::sum, options));
      }
    };
    for (std::size_t i = 0; i < w.size(); ++i)
      call_all_of(last_first ? w.size() - 1 - i : i);
    for (std::int32_t step = 0; step < steps; ++step) {
      SCOPED_TRACE(step);
      auto& refs = x[static_cast<std::size_t>(step)];
      if (step != refused) {
        expect_ok(all[static_cast<std::size_t>(step)]);
        EXPECT_TRUE(all_hold(refs, step * static_cast<std::int32_t>(w.size())));
        continue;
      }
      expect_code(all[static_cast<std::size_t>(step)], errc::deadline_exceeded);
      for (auto& ref : refs)
        EXPECT_TRUE(has_code(ref.access(), errc::skipped));
    }
  }
}

// All of its messages count as calls, and fail at their peers too.
TEST_F(RankCalls, ExchangeThatIsRefusedLeavesAllInStep) {
  TROUPE_NEEDS_DEVICES(2);
  auto stale = must(w.device_of(0).allocate<std::int32_t>(8));
  {
    testing::world_feed feed{system, w.actor()};
    must(answer_of(w.device_of(0).reset()));
    feed.until(world_phase::ready, 2);
  }
  auto x = numbers();
  auto y = numbers();
  for (int i = 0; i < 3; ++i) {
    const auto code = i == 0 ? errc::stale_ref : errc::deadline_exceeded;
    auto refused = w.rank(0).exchange({{1, x[0]}, {1, i == 0 ? stale : x[0]}}, {{1, y[0]}},
                                      {.deadline = i == 0 ? 0ns : -1ns});
    EXPECT_TRUE(has_code(answer_of(refused), code));
    expect_code({w.rank(1).recv(x[1], 0), w.rank(1).recv(y[1], 0), w.rank(1).send(x[1], 0)}, code);
    for (std::size_t rank : {0, 1})
      for (auto* refs : {&x, &y})
        testing::accept_bytes(w.device_of(rank), (*refs)[rank]);
    auto mine = w.rank(0).exchange({{1, x[0]}}, {{1, y[0]}});
    auto other = w.rank(1).exchange({{0, x[1]}}, {{0, y[1]}});
    expect_ok({mine, other});
    EXPECT_TRUE(holds(w.device_of(0), y[0], std::vector<std::int32_t>(8, 2)));
    EXPECT_TRUE(holds(w.device_of(1), y[1], std::vector<std::int32_t>(8, 1)));
  }
}

// All messages of the exchange count as calls, no matter how many had been started.
TEST_F(RankCalls, ExchangeWhoseTimeIsOverEndsAtAllItsOtherEnds) {
  TROUPE_NEEDS_DEVICES(2);
  constexpr std::size_t many = 300;
  auto x = numbers();
  for (auto limit : {1ns, 100000ns, 500000ns}) {
    auto all =
        w.rank(0).exchange(std::vector<message_end>(many, {1, x[0]}), {}, {.deadline = limit});
    EXPECT_TRUE(has_code(answer_of(all), errc::deadline_exceeded));
    // The error is the sender's, unless the message was under way before the sender's end.
    for (std::size_t i = 0; i < many; ++i) {
      auto got = answer_of(w.rank(1).recv(x[1], 0));
      if (!got) {
        EXPECT_EQ(failure_of(got.error())->rank, 0) << describe(got.error());
      }
    }
  }
  expect_ok({w.rank(0).exchange({{1, x[0]}}, {}), w.rank(1).recv(x[1], 0)}); // no rank is behind
  auto late = w.rank(0).all_reduce(x[0], reduce_op::sum, {.deadline = 1ns});
  EXPECT_TRUE(has_code(answer_of(late), errc::deadline_exceeded));
  EXPECT_TRUE(has_code(answer_of(w.rank(1).all_reduce(x[1])), errc::deadline_exceeded));
}

TEST_F(RankCalls, AsMessages) {
  auto x = numbers();
  std::atomic<std::size_t> done{0};
  on_all_ranks(w, [&](std::size_t rank) {
    collective call;
    call.send = {x[rank]};
    done += static_cast<bool>(
        ask<collective_done>(system, w.actor(), rank_local{static_cast<int>(rank), call, {}}));
  });
  EXPECT_EQ(done, w.size());
  EXPECT_TRUE(all_hold(x, sum()));
  EXPECT_TRUE(has_code(ask<collective_done>(system, w.actor(), rank_local{17, {}, {}}),
                       errc::invalid_argument));
}

TEST_F(RankCalls, EndWithADevicesReset) {
  TROUPE_NEEDS_DEVICES(2);
  auto x = numbers();
  auto first = w.rank(0).all_reduce(x[0]);
  must(answer_of(w.device_of(1).reset()));
  EXPECT_TRUE(has_code(answer_of(first), errc::device_reset));
  x = numbers();
  auto late = all_reduce_of_the_rest(x);
  expect_code(late, errc::device_reset);
  accept_all(w, x);
  expect_ok(on_each([&](world_rank r, std::size_t i) { return r.all_reduce(x[i]); }));
  EXPECT_TRUE(all_hold(x, sum()));
}

TEST_F(RankCalls, ThatMeanAMembershipHaveNoPartInOthers) {
  TROUPE_NEEDS_DEVICES(2);
  const auto before = w.status().membership;
  auto x = numbers();
  auto first = w.rank(0).all_reduce(x[0]);
  must(answer_of(w.device_of(1).reset()));
  EXPECT_TRUE(has_code(answer_of(first), errc::device_reset));
  ASSERT_TRUE(testing::eventually([&] {
    auto now = w.status();
    return now.phase == world_phase::ready && now.membership > before;
  }));
  const request_options now{.deadline = {}, .membership = w.status().membership};
  const auto sum_up = [&](std::size_t i, const request_options& options) {
    return w.rank(i).all_reduce(x[i], reduce_op::sum, options);
  };
  // An earlier failed call does not affect calls that name the new membership.
  x = numbers();
  expect_ok(on_each([&](world_rank, std::size_t i) { return sum_up(i, now); }));
  EXPECT_TRUE(all_hold(x, sum()));
  // A rank that names an old membership has no part in the others' current call and does not end
  // it.
  x = numbers();
  auto soon = now;
  soon.deadline = 100ms;
  auto given_up = sum_up(0, soon);
  const request_options old{.deadline = {}, .membership = before};
  EXPECT_TRUE(has_code(answer_of(w.rank(1).barrier(old)), errc::membership_changed));
  EXPECT_TRUE(has_code(answer_of(given_up), errc::deadline_exceeded));
  EXPECT_TRUE(has_code(answer_of(sum_up(1, old)), errc::membership_changed));
  answers late;
  for (std::size_t rank = 1; rank < w.size(); ++rank)
    late.push_back(sum_up(rank, now));
  expect_code(late, errc::deadline_exceeded);
  accept_all(w, x);
  expect_ok(on_each([&](world_rank, std::size_t i) { return sum_up(i, now); }));
  EXPECT_TRUE(all_hold(x, sum()));
}

TEST_F(RankCalls, WaitingWhenTheWorldIsShutDown) {
  TROUPE_NEEDS_DEVICES(2);
  auto x = numbers();
  auto y = numbers();
  auto first = w.rank(0).all_reduce(x[0]);
  auto messages = w.rank(0).exchange({{1, y[0]}}, {});
  auto behind = w.device_of(0).fill(x[0], 3);
  detail::anon_send(w.actor(), shutdown{});
  EXPECT_TRUE(has_code(answer_of(first), errc::unavailable));
  EXPECT_TRUE(has_code(answer_of(messages), errc::unavailable));
  EXPECT_TRUE(is_ok(answer_of(behind)));
  EXPECT_TRUE(has_code(answer_of(w.rank(1).all_reduce(x[1])), errc::unavailable));
  EXPECT_TRUE(has_code(answer_of(w.rank(1).exchange({}, {{0, y[1]}})), errc::unavailable));
}

class FewRankCalls : public RankCalls {
protected:
  FewRankCalls() : RankCalls({.waiting_limit = 4}) {}
};

TEST_F(FewRankCalls, MayBeAhead) {
  TROUPE_NEEDS_DEVICES(2);
  auto x = numbers();
  answers ahead;
  for (int i = 0; i < 4; ++i)
    ahead.push_back(w.rank(0).all_reduce(x[0], reduce_op::max));
  auto y = numbers();
  constexpr int too_many = 1000;
  for (int i = 0; i < too_many; ++i)
    EXPECT_TRUE(has_code(
        answer_of(w.rank(0).all_reduce(y[0], reduce_op::sum, {.room = room_policy::refuse})),
        errc::overloaded));
  for (std::size_t rank = 1; rank < w.size(); ++rank)
    for (int i = 0; i < 4; ++i)
      ahead.push_back(w.rank(rank).all_reduce(x[rank], reduce_op::max));
  expect_ok(ahead);
  EXPECT_TRUE(all_hold(x, static_cast<std::int32_t>(w.size())));
  // The other ranks' calls of the refused operations fail with them. Later calls match again.
  for (std::size_t rank = 1; rank < w.size(); ++rank)
    for (int i = 0; i < too_many; ++i)
      EXPECT_TRUE(has_code(answer_of(w.rank(rank).all_reduce(y[rank])), errc::overloaded));
  accept_all(w, y);
  expect_ok(on_each([&](world_rank r, std::size_t i) { return r.all_reduce(y[i]); }));
  EXPECT_TRUE(all_hold(y, sum()));
}

class HastyRankCalls : public RankCalls {
protected:
  HastyRankCalls() : RankCalls({.stall_limit = 100ms}) {}
};

TEST_F(HastyRankCalls, StallAsOneOperation) {
  TROUPE_NEEDS_DEVICES(2);
  TROUPE_HOST_ONLY("its streams are held");
  auto x = numbers();
  testing::gate held;
  auto launched = held.hold_stream(w.device_of(1), {}, {x[1]});
  ASSERT_TRUE(held.wait_reached());
  auto all = on_each([&](world_rank r, std::size_t i) { return r.all_reduce(x[i]); });
  for (auto& a : all) {
    auto got = answer_of(a);
    ASSERT_TRUE(has_code(got, errc::stalled));
    EXPECT_EQ(failure_of(got.error())->rank, 1);
    EXPECT_EQ(failure_of(got.error())->parts.size(), w.size());
  }
  held.open();
  EXPECT_TRUE(is_ok(answer_of(launched)));
  auto y = numbers();
  expect_ok(on_each([&](world_rank r, std::size_t i) { return r.all_reduce(y[i]); }));
  EXPECT_TRUE(all_hold(y, sum()));
}

class LastRankCalls : public RankCalls {
protected:
  LastRankCalls() : RankCalls({.stall_limit = 100ms, .restarts = 0}) {}
};

TEST_F(LastRankCalls, OfAWorldThatHasFailedSaySo) {
  TROUPE_NEEDS_DEVICES(2);
  TROUPE_HOST_ONLY("its streams are held");
  auto x = numbers();
  auto y = numbers();
  testing::gate held;
  auto launched = held.hold_stream(w.device_of(1), {}, {x[1]});
  ASSERT_TRUE(held.wait_reached());
  expect_code(on_each([&](world_rank r, std::size_t i) { return r.all_reduce(x[i]); }),
              errc::stalled);
  ASSERT_TRUE(testing::eventually([&] { return w.status().phase == world_phase::failed; }));
  // The error is not that of a request that was pending then.
  expect_code(on_each([&](world_rank r, std::size_t i) { return r.all_reduce(y[i]); }),
              errc::unavailable);
  held.open();
  EXPECT_TRUE(is_ok(answer_of(launched)));
}

} // namespace

} // namespace troupe
