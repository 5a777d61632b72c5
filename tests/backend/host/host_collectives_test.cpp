#include "support/backend_fixture.hpp"
#include "support/collective_runs.hpp"
#include "support/reference.hpp"
#include <troupe/backend.hpp>
#include <troupe/error.hpp>
#include <troupe/testing/fault_plan.hpp>

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace troupe {

namespace {

using testing::build_all;
using testing::collective_run;
using testing::collectives;
using testing::group_run;
using testing::has_code;
using testing::is_ok;
using testing::message_run;
using testing::must;
using testing::open_all;
using testing::opened_device;
using testing::random_group;
using testing::reduce_ops;
using testing::stream_gate;

using bytes = std::vector<std::byte>;
using enum collective_kind;

using memory = collective_run::memory;

caf::error enqueue(backend_communicator& rank, const collective_call& call, stream_view stream) {
  return rank.enqueue({&call, 1}, stream);
}

void enqueue_all(communicator_ranks& communicator, std::vector<opened_device>& devices,
                 collective_run& run) {
  for (int i = 0; i < run.spec().ranks; ++i) {
    const auto r = static_cast<std::size_t>(i);
    ASSERT_TRUE(is_ok(enqueue(*communicator[r], run.call(i), devices[r].stream)));
  }
}

void drain_all(std::vector<opened_device>& devices) {
  for (auto& x : devices)
    x.drain();
}

void expect_alive(const communicator_ranks& communicator) {
  for (const auto& x : communicator)
    EXPECT_TRUE(is_ok(x->asynchronous_error()));
}

// -- every collective

using kind_and_type = std::tuple<collective_kind, dtype>;

std::string name_of(const ::testing::TestParamInfo<kind_and_type>& info) {
  const auto [what, type] = info.param;
  return std::string{to_string(what)} + "_" + std::string{to_string(type)};
}

class HostCollective : public ::testing::TestWithParam<kind_and_type> {};

INSTANTIATE_TEST_SUITE_P(All, HostCollective,
                         ::testing::Combine(::testing::ValuesIn(collectives),
                                            ::testing::ValuesIn(real_dtypes)),
                         name_of);

TEST_P(HostCollective, GivesEachRankWhatItMustHave) {
  const auto [what, type] = GetParam();
  const auto backend = make_host_backend();
  auto devices = open_all(*backend);
  std::uint64_t seed = 1;
  for (int ranks = 1; ranks <= 8; ++ranks) {
    auto communicator = build_all(*backend, ranks);
    // The last count is so large that the ranks share the work, with slices that end early.
    for (const std::size_t count : {0, 1, 7, 1'000, 20'000 / static_cast<int>(size_of(type)) + 7})
      for (int root = 0; root < (has_root(what) ? ranks : 1); ++root)
        for (const auto where : {memory::apart, memory::in_place}) {
          ++seed;
          if (count >= 1'000 && root > 0 && root < ranks - 1 && seed % 4 != 0)
            continue;
          collective_run run{
              {.what = what,
               .type = type,
               .count = count,
               .ranks = ranks,
               .op = reduce_ops[seed % reduce_ops.size()],
               .root = root,
               .seed = seed,
               .kind = seed % 5 < 2 ? testing::input_kind::any : testing::input_kind::exact},
              where};
          ASSERT_NO_FATAL_FAILURE(enqueue_all(communicator, devices, run));
          drain_all(devices);
          ASSERT_NO_FATAL_FAILURE(run.expect_right());
        }
    expect_alive(communicator);
    EXPECT_TRUE(is_ok(backend->destroy(std::move(communicator))));
  }
}

TEST(HostCollectives, ABarrierLetsNobodyPassBeforeAllHaveCome) {
  const auto backend = make_host_backend({.devices = 3});
  auto devices = open_all(*backend);
  auto communicator = build_all(*backend, 3);
  stream_gate gate;
  gate.enqueue(devices[1]);
  for (std::size_t r = 0; r < 3; ++r) {
    ASSERT_TRUE(is_ok(enqueue(*communicator[r], {.what = barrier}, devices[r].stream)));
    ASSERT_TRUE(is_ok(devices[r]->record(devices[r].end, devices[r].stream)));
  }
  for (const auto& x : devices)
    EXPECT_FALSE(must(x->query(x.end)));
  gate.open();
  for (const auto& x : devices)
    EXPECT_TRUE(is_ok(x->synchronize(x.end)));
}

TEST(HostCollectives, FactorsAndPlansAreCopied) {
  const auto backend = make_host_backend({.devices = 2});
  auto devices = open_all(*backend);
  auto communicator = build_all(*backend, 2);
  std::array<std::int32_t, 2> values{3, 4};
  std::array<std::array<std::int32_t, 3>, 2> sent{{{1, 2, 3}, {4, 5, 6}}};
  std::array<std::array<std::int32_t, 3>, 2> received{};
  std::array<stream_gate, 2> gates;
  for (std::size_t r = 0; r < 2; ++r) {
    gates[r].enqueue(devices[r]);
    std::array<std::byte, 5> odd{};
    const std::int32_t factor = r == 0 ? 10 : -1;
    std::memcpy(odd.data() + 1, &factor, sizeof factor); // misaligned on purpose
    exchange_plan plan{{1, 2}, {0, 1}, {1, 2}, {0, 1}};
    if (r == 1)
      plan = {{2, 1}, {1, 0}, {2, 1}, {0, 2}};
    std::vector<collective_call> calls{{.send = &values[r],
                                        .recv = &values[r],
                                        .count = 1,
                                        .type = dtype::int32,
                                        .op = reduce_op::premul_sum,
                                        .factor = odd.data() + 1},
                                       {.what = all_to_all_v,
                                        .send = sent[r].data(),
                                        .recv = received[r].data(),
                                        .type = dtype::int32,
                                        .plan = &plan}};
    ASSERT_TRUE(is_ok(communicator[r]->enqueue(calls, devices[r].stream)));
    odd.fill(std::byte{0xff});
    plan.send_counts.assign(2, 1'000'000'000);
    plan.recv_counts.clear();
    calls.clear();
  }
  for (auto& x : gates)
    x.open();
  drain_all(devices);
  EXPECT_EQ(values, (std::array<std::int32_t, 2>{26, 26}));
  EXPECT_EQ(received[0], (std::array<std::int32_t, 3>{1, 5, 6}));
  EXPECT_EQ(received[1], (std::array<std::int32_t, 3>{2, 3, 4}));
}

// -- messages and groups

class HostMessages : public ::testing::TestWithParam<dtype> {};

INSTANTIATE_TEST_SUITE_P(All, HostMessages, ::testing::ValuesIn(real_dtypes),
                         [](const auto& x) { return std::string{to_string(x.param)}; });

TEST_P(HostMessages, EveryRankSendsToEveryRankAndToItself) {
  const auto backend = make_host_backend();
  auto devices = open_all(*backend);
  std::mt19937 random{31};
  for (int ranks = 1; ranks <= 8; ++ranks) {
    auto communicator = build_all(*backend, ranks);
    for (const std::size_t count : {0, 1, 7, 1'000, 20'000}) {
      group_run run;
      for (int from = 0; from < ranks; ++from)
        for (int to = 0; to < ranks; ++to)
          run.messages.push_back(
              std::make_unique<message_run>(from, to, GetParam(), count, random));
      for (int i = 0; i < ranks; ++i) {
        const auto r = static_cast<std::size_t>(i);
        ASSERT_TRUE(is_ok(communicator[r]->enqueue(run.calls(i, random), devices[r].stream)));
      }
      drain_all(devices);
      ASSERT_NO_FATAL_FAILURE(run.expect_right());
    }
    expect_alive(communicator);
    EXPECT_TRUE(is_ok(backend->destroy(std::move(communicator))));
  }
}

TEST(HostGroups, OfAnyPatternGetThroughAlsoOverSeveralStreams) {
  const auto backend = make_host_backend();
  auto devices = open_all(*backend);
  std::vector<stream_view> more;
  for (auto& x : devices)
    more.push_back(must(x->create_stream()));
  for (const unsigned seed : {1, 2, 3, 4, 5, 6}) {
    std::mt19937 random{seed};
    const auto ranks = static_cast<int>(2 + random() % 7);
    auto communicator = build_all(*backend, ranks);
    std::vector<group_run> groups;
    for (int i = 0; i < 60; ++i)
      groups.push_back(random_group(ranks, random));
    for (int i = 0; i < ranks; ++i) {
      const auto r = static_cast<std::size_t>(i);
      for (auto& group : groups) {
        const auto calls = group.calls(i, random);
        const auto stream = random() % 4 == 0 ? more[r] : devices[r].stream;
        if (!calls.empty()) {
          ASSERT_TRUE(is_ok(communicator[r]->enqueue(calls, stream)));
        }
      }
    }
    for (std::size_t r = 0; r < devices.size(); ++r) {
      devices[r].drain();
      ASSERT_TRUE(is_ok(devices[r]->record(devices[r].end, more[r])));
      ASSERT_TRUE(is_ok(devices[r]->synchronize(devices[r].end)));
    }
    expect_alive(communicator);
    for (const auto& group : groups)
      ASSERT_NO_FATAL_FAILURE(group.expect_right()) << "seed " << seed;
  }
}

TEST(HostGroups, MessagesOfTwoRanksMatchInOrder) {
  constexpr int messages = 400;
  const auto backend = make_host_backend({.devices = 3});
  auto devices = open_all(*backend);
  auto communicator = build_all(*backend, 3);
  std::mt19937 random{13};
  // Rank 1 sends one by one. Rank 2 receives in groups. Rank 0 takes no part.
  std::vector<std::unique_ptr<message_run>> all;
  for (int i = 0; i < messages; ++i) {
    all.push_back(std::make_unique<message_run>(1, 2, dtype::uint8, 1, random));
    ASSERT_TRUE(is_ok(enqueue(*communicator[1], all.back()->send(), devices[1].stream)));
  }
  for (std::size_t i = 0; i < all.size();) {
    std::vector<collective_call> group;
    for (auto n = 1 + random() % 9; n > 0 && i < all.size(); --n)
      group.push_back(all[i++]->recv());
    ASSERT_TRUE(is_ok(communicator[2]->enqueue(group, devices[2].stream)));
  }
  drain_all(devices);
  for (const auto& x : all)
    ASSERT_NO_FATAL_FAILURE(x->expect_right());
  expect_alive(communicator);
}

TEST(HostGroups, AMessageGoesThroughWhileItsRankIsInACollective) {
  const auto backend = make_host_backend({.devices = 2});
  auto devices = open_all(*backend);
  auto communicator = build_all(*backend, 2);
  std::mt19937 random{1};
  for (const bool sends : {false, true}) {
    // Rank 1 enters the barrier only after its message to or from rank 0, which is already in it.
    message_run message{sends ? 0 : 1, sends ? 1 : 0, dtype::int32, 100, random};
    const std::vector<collective_call> group{{.what = barrier},
                                             sends ? message.send() : message.recv()};
    ASSERT_TRUE(is_ok(communicator[0]->enqueue(group, devices[0].stream)));
    ASSERT_TRUE(is_ok(
        enqueue(*communicator[1], sends ? message.recv() : message.send(), devices[1].stream)));
    ASSERT_TRUE(is_ok(enqueue(*communicator[1], {.what = barrier}, devices[1].stream)));
    drain_all(devices);
    message.expect_right();
  }
}

TEST(HostGroups, ACallWaitsForItsOwnMessages) {
  const auto backend = make_host_backend({.devices = 2});
  auto devices = open_all(*backend);
  auto communicator = build_all(*backend, 2);
  std::mt19937 random{1};
  message_run there{0, 1, dtype::int32, 10, random};
  message_run back{1, 0, dtype::int32, 10, random};
  const std::vector<collective_call> group{there.send(), back.recv()};
  ASSERT_TRUE(is_ok(communicator[0]->enqueue(group, devices[0].stream)));
  ASSERT_TRUE(is_ok(devices[0]->record(devices[0].end, devices[0].stream)));
  ASSERT_TRUE(is_ok(enqueue(*communicator[1], there.recv(), devices[1].stream)));
  devices[1].drain();
  there.expect_right();
  EXPECT_FALSE(must(devices[0]->query(devices[0].end)));
  ASSERT_TRUE(is_ok(enqueue(*communicator[1], back.send(), devices[1].stream)));
  ASSERT_TRUE(is_ok(devices[0]->synchronize(devices[0].end)));
  back.expect_right();
}

// -- bad arguments

struct bad_call {
  std::string name;
  collective_call call;
};

/// Memory, plans and factors that the calls point to.
constexpr std::size_t room = 64;
std::array<float, room> some_memory{};
const exchange_plan good_plan{{1, 1}, {0, 1}, {1, 1}, {0, 1}};
const exchange_plan plan_that_only_sends{{1, 0}, {0, 0}, {0, 0}, {0, 0}};
const exchange_plan plan_that_only_receives{{0, 0}, {0, 0}, {0, 1}, {0, 0}};
const exchange_plan plan_without_send_counts{{1}, {0, 1}, {1, 1}, {0, 1}};
const exchange_plan plan_without_send_offsets{{1, 1}, {}, {1, 1}, {0, 1}};
const exchange_plan plan_without_recv_counts{{1, 1}, {0, 1}, {1, 1, 1}, {0, 1}};
const exchange_plan plan_without_recv_offsets{{1, 1}, {0, 1}, {1, 1}, {0}};

/// Returns a valid call of rank 0 of 2 ranks, where rank 0 is the root.
collective_call good_call(collective_kind what) {
  collective_call x{.what = what,
                    .send = some_memory.data(),
                    .recv = some_memory.data() + room / 2,
                    .count = 2,
                    .type = dtype::float32};
  if (what == all_to_all_v)
    x.plan = &good_plan;
  return x;
}

std::vector<bad_call> bad_calls() {
  std::vector<bad_call> result;
  const auto add = [&](collective_kind what, const char* why, auto change) {
    auto call = good_call(what);
    change(call);
    result.push_back({std::string{to_string(what)} + " with " + why, call});
  };
  using call = collective_call;
  for (const auto what : {all_reduce, reduce, broadcast, all_gather, reduce_scatter, all_to_all,
                          all_to_all_v, gather, scatter, send, recv}) {
    if (what != recv)
      add(what, "null send", [](call& x) { x.send = nullptr; });
    if (what != send)
      add(what, "null recv", [](call& x) { x.recv = nullptr; });
    add(what, "an unknown dtype", [](call& x) { x.type = static_cast<dtype>(12); });
    if (what != all_to_all_v)
      add(what, "too many elements",
          [](call& x) { x.count = std::numeric_limits<std::size_t>::max() / 4; });
    if (has_root(what) || what == send || what == recv) {
      add(what, "peer -1", [](call& x) { x.peer = -1; });
      add(what, "peer 2", [](call& x) { x.peer = 2; });
    }
  }
  for (const auto what : {all_reduce, reduce, reduce_scatter}) {
    add(what, "no factor", [](call& x) { x.op = reduce_op::premul_sum; });
    add(what, "an unknown op", [](call& x) { x.op = static_cast<reduce_op>(6); });
  }
  // This rank is not the root.
  add(reduce, "null send of another", [](call& x) { x.send = nullptr, x.peer = 1; });
  add(gather, "null send of another", [](call& x) { x.send = nullptr, x.peer = 1; });
  add(broadcast, "null recv of another", [](call& x) { x.recv = nullptr, x.peer = 1; });
  add(scatter, "null recv of another", [](call& x) { x.recv = nullptr, x.peer = 1; });
  add(all_to_all_v, "no plan", [](call& x) { x.plan = nullptr; });
  add(all_to_all_v, "null send and a plan that only sends",
      [](call& x) { x.send = nullptr, x.plan = &plan_that_only_sends; });
  add(all_to_all_v, "null recv and a plan that only receives",
      [](call& x) { x.recv = nullptr, x.plan = &plan_that_only_receives; });
  for (const auto* plan : {&plan_without_send_counts, &plan_without_send_offsets,
                           &plan_without_recv_counts, &plan_without_recv_offsets})
    add(all_to_all_v, "a plan of another size", [plan](call& x) { x.plan = plan; });
  add(barrier, "an unknown kind",
      [](call& x) { x.what = static_cast<collective_kind>(static_cast<int>(barrier) + 1); });
  return result;
}

TEST(HostCollectives, RejectsBadCallsAndEnqueuesNothing) {
  const auto backend = make_host_backend({.devices = 2});
  auto devices = open_all(*backend);
  auto communicator = build_all(*backend, 2);
  auto& rank = *communicator[0];
  EXPECT_TRUE(has_code(rank.enqueue({}, devices[0].stream), errc::invalid_argument));
  for (const auto& [name, call] : bad_calls()) {
    const auto err = enqueue(rank, call, devices[0].stream);
    ASSERT_TRUE(has_code(err, errc::invalid_argument)) << name;
    EXPECT_EQ(failure_of(err)->rank, 0) << name;
    // At the end of a group.
    const std::vector<collective_call> group{{.what = barrier}, good_call(send), call};
    ASSERT_TRUE(has_code(rank.enqueue(group, devices[0].stream), errc::invalid_argument)) << name;
  }
  for (const auto what : collectives)
    EXPECT_TRUE(has_code(enqueue(rank, good_call(what), {}), errc::invalid_argument));
  // If one of the calls above had been enqueued, these calls would not match it.
  std::array<std::int32_t, 2> values{1, 2};
  for (std::size_t r = 0; r < 2; ++r)
    ASSERT_TRUE(is_ok(testing::all_reduce(*communicator[r], &values[r], &values[r], 1, dtype::int32,
                                          reduce_op::sum, devices[r].stream)));
  drain_all(devices);
  expect_alive(communicator);
  EXPECT_EQ(values, (std::array<std::int32_t, 2>{3, 3}));
}

TEST(HostCollectives, TheirGoodCallsAreGood) { // without this, the test above would prove little
  const auto backend = make_host_backend({.devices = 2});
  auto devices = open_all(*backend);
  for (const auto what : {all_reduce, reduce, broadcast, all_gather, reduce_scatter, all_to_all,
                          all_to_all_v, gather, scatter, send, recv, barrier}) {
    auto communicator = build_all(*backend, 2);
    EXPECT_TRUE(is_ok(enqueue(*communicator[0], good_call(what), devices[0].stream)));
    EXPECT_TRUE(is_ok(backend->abort(std::move(communicator))));
    devices[0].drain();
  }
}

// -- mismatches

struct mismatch_case {
  const char* name;
  collective_call usual;
  collective_call other; ///< of rank 1
};

const std::array<float, 2> factors{2, 3};
const exchange_plan one_each{{1, 1, 1}, {0, 1, 2}, {1, 1, 1}, {0, 1, 2}};

std::vector<mismatch_case> mismatch_cases() {
  using call = collective_call;
  std::vector<mismatch_case> result;
  const auto add = [&](const char* name, collective_kind what, auto change) {
    call usual{.what = what, .count = 2, .type = dtype::float32};
    auto other = usual;
    change(other);
    result.push_back({name, usual, other});
  };
  add("KindOfAllReduce", all_reduce, [](call& x) { x.what = broadcast; });
  add("KindOfBarrier", barrier, [](call& x) { x.what = all_gather; });
  add("KindOfGather", gather, [](call& x) { x.what = scatter; });
  result.push_back({"KindOfAllToAllV",
                    {.what = all_to_all_v, .type = dtype::float32, .plan = &one_each},
                    {.what = all_reduce, .count = 2, .type = dtype::float32}});
  for (const auto what :
       {reduce, broadcast, all_gather, reduce_scatter, all_to_all, gather, scatter}) {
    add("Count", what, [](call& x) { x.count = 1; });
    add("NoElements", what, [](call& x) { x.count = 0; });
    add("ManyElements", what, [](call& x) { x.count = 10'000; });
    add("Type", what, [](call& x) { x.type = dtype::int32; });
  }
  for (const auto what : {reduce, broadcast, gather, scatter})
    add("Root", what, [](call& x) { x.peer = 2; });
  for (const auto what : {all_reduce, reduce, reduce_scatter}) {
    add("Op", what, [](call& x) { x.op = reduce_op::max; });
    add("Premul", what, [](call& x) { x.op = reduce_op::premul_sum, x.factor = &factors[0]; });
  }
  return result;
}

/// Lets three ranks call, each with its own memory. The error must name rank 1 as the cause.
void expect_mismatch(const std::function<std::vector<collective_call>(int)>& calls_of) {
  const auto backend = make_host_backend({.devices = 3});
  auto devices = open_all(*backend);
  auto communicator = build_all(*backend, 3);
  const bytes before(240'000, std::byte{1});
  std::vector<bytes> sends(3, before);
  std::vector<bytes> recvs(3, before);
  for (std::size_t r = 0; r < 3; ++r) {
    auto calls = calls_of(static_cast<int>(r));
    for (auto& x : calls) {
      x.send = sends[r].data();
      x.recv = recvs[r].data();
    }
    if (!calls.empty()) {
      ASSERT_TRUE(is_ok(communicator[r]->enqueue(calls, devices[r].stream)));
    }
  }
  // No rank would ever complete these calls.
  for (std::size_t r = 0; r < 3; ++r) {
    if (r != 1) {
      const auto err = enqueue(*communicator[r], {.what = barrier}, devices[r].stream);
      EXPECT_TRUE(!err || code_of(err) == errc::collective_mismatch);
    }
  }
  for (std::size_t r = 0; r < 3; ++r) {
    devices[r].drain();
    const auto err = communicator[r]->asynchronous_error();
    ASSERT_TRUE(has_code(err, errc::collective_mismatch));
    EXPECT_EQ(failure_of(err)->rank, 1);
    EXPECT_EQ(sends[r], before);
    EXPECT_EQ(recvs[r], before);
    EXPECT_TRUE(has_code(enqueue(*communicator[r], {.what = barrier}, devices[r].stream),
                         errc::collective_mismatch));
  }
  EXPECT_TRUE(is_ok(backend->abort(std::move(communicator))));
}

TEST(HostCollectives, AMismatchIsAnErrorOnEveryRank) {
  for (const auto& x : mismatch_cases()) {
    SCOPED_TRACE(std::string{to_string(x.usual.what)} + ": " + x.name);
    expect_mismatch([&](int rank) { return std::vector{rank == 1 ? x.other : x.usual}; });
  }
}

TEST(HostCollectives, AMismatchOfPlansIsAnErrorOnEveryRank) {
  const exchange_plan plan{{1, 1, 1}, {0, 1, 2}, {1, 1, 1}, {0, 1, 2}};
  const exchange_plan takes_more{{1, 1, 1}, {0, 1, 2}, {1, 1, 2}, {0, 1, 2}};
  for (const bool wrong_type : {false, true})
    expect_mismatch([&](int rank) {
      const auto odd = rank == 1;
      return std::vector<collective_call>{{.what = all_to_all_v,
                                           .type = odd && wrong_type ? dtype::int8 : dtype::float64,
                                           .plan = odd && !wrong_type ? &takes_more : &plan}};
    });
}

TEST(HostGroups, AMessageOfAnotherSizeIsAnErrorOnEveryRank) {
  for (const std::size_t count : {0, 3, 5, 20'000})
    expect_mismatch([&](int rank) -> std::vector<collective_call> {
      if (rank == 0)
        return {{.what = send, .count = 4, .type = dtype::float32, .peer = 1}};
      if (rank == 1)
        return {{.what = recv, .count = count, .type = dtype::float32, .peer = 0}};
      return {};
    });
}

TEST(HostGroups, AMessageMayChangeItsType) {
  const auto backend = make_host_backend({.devices = 2});
  auto devices = open_all(*backend);
  auto communicator = build_all(*backend, 2);
  std::array<std::uint64_t, 2> values{0x0123456789abcdef, 0};
  ASSERT_TRUE(is_ok(
      enqueue(*communicator[0],
              {.what = send, .send = &values[0], .count = 1, .type = dtype::uint64, .peer = 1},
              devices[0].stream)));
  ASSERT_TRUE(
      is_ok(enqueue(*communicator[1],
                    {.what = recv, .recv = &values[1], .count = 8, .type = dtype::uint8, .peer = 0},
                    devices[1].stream)));
  drain_all(devices);
  EXPECT_EQ(values[1], values[0]);
}

// -- the end of a communicator while calls run

/// Collectives of one kind among four ranks, or messages from each rank to the next.
class HostCollectiveEnd
    : public ::testing::TestWithParam<std::tuple<collective_kind, std::size_t>> {
protected:
  static constexpr int ranks = 4;
  static constexpr std::size_t missing = 2;

  collective_run collective(std::uint64_t seed) const {
    const auto [what, count] = GetParam();
    return {{.what = what == send ? all_reduce : what,
             .type = dtype::float32,
             .count = count,
             .ranks = ranks,
             .root = static_cast<int>(missing),
             .seed = 2 * seed},
            memory::apart};
  }

  /// Returns the rank's calls. Messages use the memory that `run` has for an all-reduce.
  std::vector<collective_call> calls(collective_run& run, int rank) const {
    auto x = run.call(rank);
    if (std::get<0>(GetParam()) != send)
      return {x};
    auto y = x;
    x.what = send;
    x.peer = (rank + 1) % ranks;
    y.what = recv;
    y.peer = (rank + ranks - 1) % ranks;
    return {x, y};
  }

  std::shared_ptr<backend> host = make_host_backend({.devices = ranks});
  std::vector<opened_device> devices = open_all(*host);
  communicator_ranks communicator = build_all(*host, ranks);

  void enqueue_without_the_missing(collective_run& run) {
    for (int i = 0; i < ranks; ++i) {
      const auto r = static_cast<std::size_t>(i);
      if (r == missing)
        continue;
      ASSERT_TRUE(is_ok(communicator[r]->enqueue(calls(run, i), devices[r].stream)));
      ASSERT_TRUE(is_ok(devices[r]->record(devices[r].end, devices[r].stream)));
    }
  }
};

constexpr std::array with_messages{all_reduce,     reduce,     broadcast,   all_gather,
                                   reduce_scatter, all_to_all, gather,      scatter,
                                   barrier,        send,       all_to_all_v};

INSTANTIATE_TEST_SUITE_P(All, HostCollectiveEnd,
                         ::testing::Combine(::testing::ValuesIn(with_messages),
                                            ::testing::Values(3, 20'000)),
                         [](const auto& x) {
                           return std::string{to_string(std::get<0>(x.param))} + "_" +
                                  std::to_string(std::get<1>(x.param));
                         });

TEST_P(HostCollectiveEnd, AbortLetsWaitingRanksGo) {
  auto run = collective(1);
  enqueue_without_the_missing(run);
  EXPECT_FALSE(must(devices[3]->query(devices[3].end)));
  EXPECT_TRUE(is_ok(host->abort(std::move(communicator))));
  for (const std::size_t r : {0, 1, 3})
    EXPECT_TRUE(is_ok(devices[r]->synchronize(devices[r].end)));
  if (std::get<0>(GetParam()) != send) // some messages do not need the missing rank
    run.expect_untouched();
  run.overwrite();
}

TEST_P(HostCollectiveEnd, AClosedDeviceEndsTheOthers) {
  auto run = collective(2);
  enqueue_without_the_missing(run);
  devices.erase(devices.begin() + 1); // while the call runs
  EXPECT_TRUE(has_code(communicator[3]->asynchronous_error(), errc::nccl_error));
  for (const std::size_t d : {0, 2}) // ranks 0 and 3
    EXPECT_TRUE(is_ok(devices[d]->synchronize(devices[d].end)));
  if (std::get<0>(GetParam()) != send)
    run.expect_untouched();
  run.overwrite();
}

TEST_P(HostCollectiveEnd, ARankThatLeavesEndsTheOthers) {
  auto run = collective(3);
  enqueue_without_the_missing(run);
  communicator.erase(communicator.begin() + missing);
  for (const std::size_t r : {0, 1, 3})
    EXPECT_TRUE(is_ok(devices[r]->synchronize(devices[r].end)));
  const auto err = communicator[0]->asynchronous_error();
  EXPECT_TRUE(has_code(err, errc::nccl_error));
  EXPECT_EQ(failure_of(err)->rank, static_cast<std::int32_t>(missing));
  run.overwrite();
}

TEST_P(HostCollectiveEnd, MayComeAtAnyMoment) {
  std::mt19937 random{5};
  for (std::uint64_t i = 0; i < 25; ++i) {
    std::vector<collective_run> runs;
    for (auto n = 1 + random() % 4; n > 0; --n)
      runs.push_back(collective(i));
    const auto held = random() % 8; // a blocked rank changes the moment of the end
    const auto closes_a_device = random() % 2 == 0;
    stream_gate gate;
    for (std::size_t r = 0; r < ranks; ++r) {
      if (r == held)
        gate.enqueue(devices[r]);
      for (auto& run : runs)
        ASSERT_TRUE(
            is_ok(communicator[r]->enqueue(calls(run, static_cast<int>(r)), devices[r].stream)));
    }
    if (closes_a_device && held != 3)
      devices.pop_back(); // its rank's stream is cancelled with it
    EXPECT_TRUE(is_ok(host->abort(std::move(communicator))));
    gate.open();
    drain_all(devices);
    for (auto& run : runs)
      run.overwrite();
    if (devices.size() < ranks)
      devices.emplace_back(*host, 3);
    communicator = build_all(*host, ranks);
  }
}

TEST(HostGroups, AGroupThatIsNotIssuedKeepsTheOthersWaiting) {
  const auto plan = std::make_shared<testing::fault_plan>(1, std::vector<testing::fault_rule>{});
  const auto backend = testing::with_faults(make_host_backend({.devices = 2}), plan);
  auto devices = open_all(*backend);
  auto communicator = build_all(*backend, 2);
  plan->add({.kind = testing::fault::not_issued, .on = testing::verb::collective, .device = 1});
  std::mt19937 random{1};
  std::vector<std::unique_ptr<message_run>> messages;
  for (int from = 0; from < 2; ++from)
    messages.push_back(std::make_unique<message_run>(from, 1 - from, dtype::int32, 4, random));
  for (std::size_t r = 0; r < 2; ++r) {
    const std::vector<collective_call> group{
        messages[r]->send(), messages[1 - r]->recv(), {.what = barrier}};
    ASSERT_TRUE(is_ok(communicator[r]->enqueue(group, devices[r].stream)));
    ASSERT_TRUE(is_ok(devices[r]->record(devices[r].end, devices[r].stream)));
  }
  EXPECT_EQ(plan->injected(), 1u); // one fault for the whole group
  EXPECT_FALSE(must(devices[0]->query(devices[0].end)));
  EXPECT_TRUE(is_ok(backend->abort(std::move(communicator))));
  drain_all(devices);
}

} // namespace

} // namespace troupe
