#include "support/backend_fixture.hpp"
#include "support/entries_of.hpp"
#include <troupe/testing/fault_plan.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <future>
#include <memory>
#include <semaphore>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace troupe {

namespace {

using namespace std::chrono_literals;
using testing::any_device;
using testing::build_all;
using testing::fault;
using testing::fault_plan;
using testing::fault_rule;
using testing::forever;
using testing::has_code;
using testing::is_ok;
using testing::must;
using testing::open_all;
using testing::opened_device;
using testing::verb;
using testing::with_faults;

/// Sufficient for any machine. Only a failing test waits this long.
constexpr auto limit = 60s;

/// Devices and a communicator of a host backend with a fault plan, and one number on each device.
struct struck_world {
  explicit struck_world(int ranks = 3, std::uint64_t seed = 0, std::vector<fault_rule> rules = {})
      : plan(std::make_shared<fault_plan>(seed, std::move(rules))),
        values(static_cast<std::size_t>(ranks)),
        backend(with_faults(make_host_backend({.devices = ranks}), plan)),
        devices(open_all(*backend)), communicator(build_all(*backend, ranks)) {
    for (std::size_t r = 0; r < values.size(); ++r)
      values[r] = static_cast<std::int32_t>(r + 1);
  }

  caf::error all_reduce(std::size_t rank) {
    return testing::all_reduce(*communicator[rank], &values[rank], &values[rank], 1, dtype::int32,
                               reduce_op::sum, devices[rank].stream);
  }

  void record(std::size_t rank) {
    EXPECT_TRUE(is_ok(devices[rank]->record(devices[rank].end, devices[rank].stream)));
  }

  bool is_done(std::size_t rank) { return must(devices[rank]->query(devices[rank].end)); }

  void synchronize(std::size_t rank) {
    EXPECT_TRUE(is_ok(devices[rank]->synchronize(devices[rank].end)));
  }

  std::shared_ptr<fault_plan> plan;
  std::vector<std::int32_t> values; // outlives the streams
  std::shared_ptr<troupe::backend> backend;
  std::vector<opened_device> devices;
  communicator_ranks communicator;
};

/// Returns which of `calls` copies on a device fail.
std::vector<bool> failures_of(opened_device& x, int calls) {
  std::vector<bool> result;
  for (int i = 0; i < calls; ++i)
    result.push_back(static_cast<bool>(
        x->copy(nullptr, nullptr, 0, copy_direction::device_to_device, x.stream)));
  return result;
}

TEST(FaultPlan, NeedsNoIdOfTheBackendForADirectCommunicator) {
  auto backend = with_faults(make_host_backend({.devices = 2, .listen_address = "127.0.0.1"}),
                             std::make_shared<fault_plan>());
  auto devices = open_all(*backend);
  const auto files = testing::entries_of("/proc/self/fd");
  const std::array ranks{local_rank{0, 0}, local_rank{1, 1}};
  const auto built = must(backend->build_direct(ranks));
  EXPECT_EQ(testing::entries_of("/proc/self/fd"), files); // an id would listen at a port
}

TEST(FaultPlan, WithoutRulesNothingHappens) {
  struck_world x;
  for (std::size_t r = 0; r < 3; ++r) {
    EXPECT_TRUE(is_ok(x.all_reduce(r)));
    x.record(r);
  }
  for (std::size_t r = 0; r < 3; ++r) {
    x.synchronize(r);
    EXPECT_EQ(x.values[r], 6);
  }
  EXPECT_TRUE(is_ok(x.backend->destroy(std::move(x.communicator))));
  EXPECT_EQ(x.plan->injected(), 0u);
  EXPECT_FALSE(x.plan->poisoned());
}

TEST(FaultPlan, ADeviceIsOpenedBesideAnother) {
  const auto plan = std::make_shared<fault_plan>();
  const auto backend = with_faults(make_host_backend({.devices = 1}), plan);
  const auto first = must(backend->open(0));
  const auto second = must(backend->open_beside(0));
  const auto rule = plan->add({.kind = fault::fail, .on = verb::open});
  EXPECT_FALSE(backend->open_beside(0));
  EXPECT_EQ(plan->injected_by(rule), 1u);
  EXPECT_TRUE(backend->allows_reset());
}

TEST(FaultPlan, ACallFailsAndDoesNothing) {
  struck_world x;
  const auto rule = x.plan->add({.kind = fault::fail, .on = verb::fill, .device = 1, .first = 2});
  const std::int32_t pattern = 0xabcd;
  const auto fill = [&](std::size_t r) {
    return x.devices[r]->fill(&x.values[r], std::as_bytes(std::span{&pattern, 1}), 1,
                              x.devices[r].stream);
  };
  EXPECT_TRUE(is_ok(fill(1)));
  x.devices[1].drain();
  EXPECT_EQ(std::exchange(x.values[1], 0), pattern);
  const auto err = fill(1);
  ASSERT_TRUE(has_code(err, errc::cuda_error));
  const auto f = failure_of(err);
  EXPECT_EQ(f->device, 1);
  EXPECT_EQ(f->api, "fill");
  EXPECT_FALSE(f->detail.empty());
  x.devices[1].drain();
  EXPECT_EQ(x.values[1], 0);
  EXPECT_TRUE(is_ok(fill(1)));
  EXPECT_TRUE(is_ok(fill(0)));
  EXPECT_TRUE(is_ok(fill(0)));
  EXPECT_EQ(x.plan->injected_by(rule), 1u);
  EXPECT_EQ(x.plan->injected(fault::fail), 1u);
  EXPECT_EQ(x.plan->injected(), 1u);
}

TEST(FaultPlan, TheErrorSuitsTheVerbOrIsTheRules) {
  struck_world x;
  x.plan->add({.kind = fault::fail, .on = verb::collective});
  x.plan->add({.kind = fault::fail, .on = verb::launch_host, .error = errc::launch_failed});
  x.plan->add({.kind = fault::out_of_memory, .on = verb::allocate});
  x.plan->add({.kind = fault::fail, .on = verb::asynchronous_error, .device = 1, .times = forever});
  const auto err = x.all_reduce(2);
  EXPECT_TRUE(has_code(err, errc::nccl_error));
  EXPECT_EQ(failure_of(err)->rank, 2);
  EXPECT_TRUE(has_code(
      x.devices[0]->launch_host(x.devices[0].stream, [](void*) {}, nullptr), errc::launch_failed));
  EXPECT_TRUE(has_code(x.devices[0]->allocate(64, x.devices[0].stream), errc::out_of_memory));
  EXPECT_TRUE(x.devices[0]->allocate(64, x.devices[0].stream));
  EXPECT_TRUE(is_ok(x.communicator[0]->asynchronous_error()));
  EXPECT_TRUE(has_code(x.communicator[1]->asynchronous_error(), errc::nccl_error));
  EXPECT_TRUE(has_code(x.communicator[1]->asynchronous_error(), errc::nccl_error));
}

TEST(FaultPlan, StrikesEachDeviceUpToItsTimes) {
  struck_world x;
  x.plan->add({.kind = fault::fail, .on = verb::copy, .first = 3, .times = 2});
  for (auto& device : x.devices)
    EXPECT_EQ(failures_of(device, 6), (std::vector<bool>{false, false, true, true, false, false}));
}

TEST(FaultPlan, ADeviceComesUpAfterSomeFailures) {
  const auto plan = std::make_shared<fault_plan>(
      0, std::vector<fault_rule>{{.kind = fault::fail, .on = verb::bind, .device = 1, .times = 2},
                                 {.kind = fault::fail, .on = verb::open, .device = 0}});
  const auto backend = with_faults(make_host_backend({.devices = 2}), plan);
  EXPECT_TRUE(has_code(backend->open(0), errc::unavailable));
  EXPECT_TRUE(backend->open(0));
  for (int i = 0; i < 2; ++i)
    EXPECT_TRUE(has_code(must(backend->open(1))->bind(), errc::device_failed));
  EXPECT_TRUE(is_ok(must(backend->open(1))->bind()));
}

TEST(FaultPlan, ProbabilityFollowsFromTheSeedAlone) {
  constexpr int calls = 4'000;
  const auto run = [](std::uint64_t seed, bool threads) {
    struck_world x{
        3, seed, {{.kind = fault::fail, .on = verb::copy, .times = forever, .probability = 0.05}}};
    std::vector<std::future<std::vector<bool>>> each;
    for (auto& device : x.devices)
      each.push_back(std::async(threads ? std::launch::async : std::launch::deferred,
                                [&] { return failures_of(device, calls); }));
    std::vector<std::vector<bool>> result;
    std::uint64_t count = 0;
    for (auto& device : each) {
      result.push_back(device.get());
      count +=
          static_cast<std::uint64_t>(std::count(result.back().begin(), result.back().end(), true));
    }
    EXPECT_EQ(count, x.plan->injected(fault::fail));
    return result;
  };
  const auto first = run(1, false);
  EXPECT_EQ(run(1, true), first);
  EXPECT_NE(run(2, false), first);
  EXPECT_NE(first[0], first[1]);
  for (const auto& device : first) { // expected 200; the standard deviation is 14
    const auto count = std::count(device.begin(), device.end(), true);
    EXPECT_GT(count, 120);
    EXPECT_LT(count, 280);
  }
}

TEST(FaultPlan, TheFirstRuleThatStrikesCounts) {
  struck_world x;
  x.plan->add({.kind = fault::fail, .on = verb::copy, .first = 2, .error = errc::internal});
  const auto second = x.plan->add({.kind = fault::fail, .on = verb::copy, .times = 2});
  EXPECT_EQ(failures_of(x.devices[0], 4), (std::vector<bool>{true, true, true, false}));
  EXPECT_EQ(x.plan->injected_by(second), 2u);
}

TEST(FaultPlan, DisarmedItStrikesNoMore) {
  struck_world x;
  x.plan->add({.kind = fault::fail, .on = verb::copy, .times = forever});
  EXPECT_EQ(failures_of(x.devices[0], 2), (std::vector<bool>{true, true}));
  x.plan->disarm();
  EXPECT_EQ(failures_of(x.devices[0], 2), (std::vector<bool>{false, false}));
  x.plan->add({.kind = fault::fail, .on = verb::copy, .device = 1}); // another rule of the verb
  EXPECT_EQ(failures_of(x.devices[0], 2), (std::vector<bool>{false, false}));
  EXPECT_EQ(failures_of(x.devices[1], 2), (std::vector<bool>{true, false}));
  EXPECT_EQ(x.plan->injected(), 3u);
}

TEST(FaultPlan, AStreamHangsUntilReleased) {
  struck_world x;
  x.plan->add({.kind = fault::hang, .on = verb::copy, .device = 0});
  EXPECT_EQ(failures_of(x.devices[0], 1), std::vector<bool>{false});
  x.record(0);
  EXPECT_EQ(failures_of(x.devices[1], 1), std::vector<bool>{false});
  x.record(1);
  x.synchronize(1);
  EXPECT_TRUE(x.plan->wait_injected(fault::hang, 1, 0s));
  EXPECT_FALSE(x.is_done(0));
  x.plan->release();
  x.synchronize(0);
}

TEST(FaultPlan, AHungCollectiveGoesOnWhenReleased) {
  struck_world x;
  x.plan->add({.kind = fault::hang, .device = 1});
  for (std::size_t r = 0; r < 3; ++r) {
    EXPECT_TRUE(is_ok(x.all_reduce(r)));
    x.record(r);
  }
  for (std::size_t r = 0; r < 3; ++r)
    EXPECT_FALSE(x.is_done(r));
  x.plan->release();
  for (std::size_t r = 0; r < 3; ++r) {
    x.synchronize(r);
    EXPECT_EQ(x.values[r], 6);
  }
}

class FaultPlanAbort : public ::testing::TestWithParam<fault> {};

TEST_P(FaultPlanAbort, LetsTheRanksGo) {
  for (int run = 0; run < 20; ++run) {
    struck_world x;
    x.plan->add({.kind = GetParam(), .device = run % 2 ? 1 : any_device});
    auto other = build_all(*x.backend, 3);
    for (std::size_t r = 0; r < 3; ++r) {
      EXPECT_TRUE(is_ok(x.all_reduce(r)));
      x.record(r);
    }
    EXPECT_TRUE(x.plan->wait_injected(GetParam(), 1, limit));
    for (std::size_t r = 0; r < 3; ++r)
      EXPECT_FALSE(x.is_done(r));
    EXPECT_TRUE(is_ok(x.backend->abort(std::move(x.communicator))));
    std::array<std::int64_t, 3> values{1, 2, 3};
    for (std::size_t r = 0; r < 3; ++r) {
      x.synchronize(r);
      EXPECT_TRUE(is_ok(testing::all_reduce(*other[r], &values[r], &values[r], 1, dtype::int64,
                                            reduce_op::max, x.devices[r].stream)));
    }
    EXPECT_TRUE(is_ok(x.backend->destroy(std::move(other))));
    EXPECT_EQ(values, (std::array<std::int64_t, 3>{3, 3, 3}));
  }
}

INSTANTIATE_TEST_SUITE_P(All, FaultPlanAbort, ::testing::Values(fault::hang, fault::not_issued),
                         [](const auto& x) { return std::string{to_string(x.param)}; });

TEST(FaultPlan, ARankThatIsNotIssuedNeverTakesPart) {
  struck_world x;
  x.plan->add({.kind = fault::not_issued, .device = 2});
  for (std::size_t r = 0; r < 3; ++r) {
    EXPECT_TRUE(is_ok(x.all_reduce(r)));
    x.record(r);
  }
  x.plan->release();
  for (std::size_t r = 0; r < 3; ++r)
    EXPECT_FALSE(x.is_done(r));
  EXPECT_TRUE(is_ok(x.backend->abort(std::move(x.communicator))));
  for (std::size_t r = 0; r < 3; ++r)
    x.synchronize(r);
  EXPECT_EQ(x.values, (std::vector<std::int32_t>{1, 2, 3}));
}

TEST(FaultPlan, ASlowStreamGoesOnByItself) {
  struck_world x;
  x.plan->add({.kind = fault::slow, .on = verb::record, .device = 0, .delay = 20ms});
  const auto start = std::chrono::steady_clock::now();
  x.record(0);
  x.synchronize(0);
  EXPECT_GE(std::chrono::steady_clock::now() - start, 20ms);
  EXPECT_EQ(x.plan->injected(fault::slow), 1u);
}

TEST(FaultPlan, ASlowStreamCanBeReleased) {
  struck_world x;
  x.plan->add({.kind = fault::slow, .on = verb::record, .device = 0, .delay = 1h});
  x.record(0);
  EXPECT_FALSE(x.is_done(0));
  x.plan->release();
  x.synchronize(0);
}

TEST(FaultPlan, ACallBlocksItsThreadUntilReleased) {
  struck_world x;
  x.plan->add({.kind = fault::block, .device = 1});
  auto stuck = std::async(std::launch::async, [&] { return x.all_reduce(1); });
  EXPECT_TRUE(x.plan->wait_injected(fault::block, 1, limit));
  EXPECT_EQ(stuck.wait_for(0s), std::future_status::timeout);
  EXPECT_TRUE(is_ok(x.all_reduce(0)));
  EXPECT_TRUE(is_ok(x.all_reduce(2)));
  x.plan->release();
  EXPECT_TRUE(is_ok(stuck.get()));
  for (std::size_t r = 0; r < 3; ++r) {
    x.record(r);
    x.synchronize(r);
    EXPECT_EQ(x.values[r], 6);
  }
}

TEST(FaultPlan, BuildingFailsAndHangs) {
  struck_world x;
  x.plan->add({.kind = fault::fail, .on = verb::build, .times = 2});
  x.plan->add({.kind = fault::hang, .on = verb::build, .device = 1, .first = 3});
  const std::vector<local_rank> ranks{{0, 0}, {1, 1}};
  const auto id = must(x.backend->make_communicator_id());
  EXPECT_TRUE(has_code(x.backend->build(id, 2, ranks), errc::nccl_error));
  EXPECT_TRUE(has_code(x.backend->build(id, 2, ranks), errc::nccl_error));
  auto hung = std::async(std::launch::async, [&] { return x.backend->build(id, 2, ranks); });
  EXPECT_TRUE(x.plan->wait_injected(fault::hang, 1, limit));
  EXPECT_EQ(hung.wait_for(0s), std::future_status::timeout);
  x.plan->release();
  const auto built = hung.get();
  ASSERT_TRUE(built);
  EXPECT_EQ(built->size(), 2u);
}

TEST(FaultPlan, AnAbortThatFailsOrIsSlowStillAborts) {
  for (const auto kind : {fault::fail, fault::slow}) {
    struck_world x;
    x.plan->add({.kind = kind, .on = verb::abort, .delay = 5ms});
    EXPECT_TRUE(is_ok(x.all_reduce(0)));
    x.record(0);
    EXPECT_EQ(static_cast<bool>(x.backend->abort(std::move(x.communicator))), kind == fault::fail);
    x.synchronize(0);
    EXPECT_EQ(x.plan->injected(kind), 1u);
  }
}

TEST(FaultPlan, APoisonedProcessHasNoDeviceLeft) {
  struck_world x;
  std::counting_semaphore<> signals{0};
  auto& other = x.devices[2];
  other->set_completion_signal([&] { signals.release(); });
  x.plan->add({.kind = fault::hang, .on = verb::record, .device = 0});
  x.plan->add({.kind = fault::poison, .device = 1});
  EXPECT_TRUE(is_ok(x.all_reduce(2)));
  x.record(2);
  x.record(0);
  const auto err = x.all_reduce(1);
  ASSERT_TRUE(has_code(err, errc::device_fault));
  EXPECT_EQ(failure_of(err)->native_name, "cudaErrorIllegalAddress");
  EXPECT_EQ(failure_of(err)->native_code, 700);
  EXPECT_TRUE(x.plan->poisoned());
  EXPECT_EQ(x.plan->injected(fault::poison), 1u);
  signals.acquire(); // so that a thread that waits for a completion queries again
  const auto fault_of = [](const auto& result) { return has_code(result, errc::device_fault); };
  EXPECT_TRUE(fault_of(other->query(other.end)));
  EXPECT_TRUE(fault_of(other->bind()));
  EXPECT_TRUE(fault_of(other->properties()));
  EXPECT_TRUE(fault_of(other->memory()));
  EXPECT_TRUE(fault_of(other->allocate(1, other.stream)));
  EXPECT_TRUE(fault_of(other->create_stream()));
  EXPECT_TRUE(fault_of(other->create_event()));
  EXPECT_TRUE(fault_of(other->record(other.end, other.stream)));
  EXPECT_TRUE(fault_of(other->can_access_peer(0)));
  EXPECT_TRUE(fault_of(other->destroy_stream(other.stream)));
  EXPECT_TRUE(fault_of(x.devices[0]->synchronize(x.devices[0].end)));
  EXPECT_TRUE(fault_of(x.communicator[0]->asynchronous_error()));
  const std::vector<local_rank> ranks{{0, 0}};
  EXPECT_TRUE(fault_of(x.backend->build(must(x.backend->make_communicator_id()), 1, ranks)));
  // Rank 2 waits inside for ranks that never call.
  EXPECT_TRUE(fault_of(x.backend->destroy(std::move(x.communicator))));
}

TEST(FaultPlan, PoisonLetsBlockedCallsGoWithTheFault) {
  struck_world x;
  x.plan->add({.kind = fault::block, .on = verb::create_event, .device = 0});
  auto stuck = std::async(std::launch::async, [&] { return x.devices[0]->create_event(); });
  EXPECT_TRUE(x.plan->wait_injected(fault::block, 1, limit));
  x.plan->poison();
  EXPECT_TRUE(has_code(stuck.get(), errc::device_fault));
}

TEST(FaultPlan, ADeviceThatClosesLetsItsStreamsGo) {
  struck_world x;
  x.plan->add({.kind = fault::hang, .on = verb::record, .device = 0});
  x.plan->add({.kind = fault::not_issued, .device = 1});
  x.record(0);
  EXPECT_TRUE(is_ok(x.all_reduce(1)));
  x.devices.clear();
}

TEST(FaultPlan, WaitsForAnInjection) {
  struck_world x;
  EXPECT_FALSE(x.plan->wait_injected(fault::fail, 1, 1ms));
  x.plan->add({.kind = fault::fail, .on = verb::copy, .times = forever});
  auto waiting =
      std::async(std::launch::async, [&] { return x.plan->wait_injected(fault::fail, 5, limit); });
  EXPECT_EQ(failures_of(x.devices[0], 5), std::vector<bool>(5, true));
  EXPECT_TRUE(waiting.get());
}

/// Returns the devices to which a device cannot enable access.
std::vector<int> failures_to_enable(opened_device& x, int devices) {
  std::vector<int> result;
  for (int peer = 0; peer < devices; ++peer)
    if (x->enable_peer(peer))
      result.push_back(peer);
  return result;
}

TEST(FaultPlan, StrikesCallsThatNameADevice) {
  struck_world x;
  x.plan->add({.kind = fault::fail, .on = verb::enable_peer, .device = 0, .times = 2, .peer = 2});
  EXPECT_EQ(failures_to_enable(x.devices[0], 3), std::vector{2});
  EXPECT_EQ(failures_to_enable(x.devices[1], 3), std::vector<int>{});
  EXPECT_EQ(failures_to_enable(x.devices[0], 3), std::vector{2});
  EXPECT_EQ(failures_to_enable(x.devices[0], 3), std::vector<int>{});
  x.plan->add({.kind = fault::fail, .on = verb::admit_peer, .peer = 1});
  EXPECT_TRUE(is_ok(x.devices[0]->admit_peer(2)));
  EXPECT_TRUE(has_code(x.devices[0]->admit_peer(1), errc::cuda_error));
  x.plan->add({.kind = fault::fail, .on = verb::link, .device = 1, .peer = 0});
  EXPECT_TRUE(x.backend->link(0, 1));
  EXPECT_TRUE(x.backend->link(1, 2));
  EXPECT_TRUE(has_code(x.backend->link(1, 0), errc::cuda_error));
}

TEST(FaultPlan, ACopyBetweenDevicesFailsAndHangs) {
  struck_world x;
  must(x.devices[0]->enable_peer(1));
  must(x.devices[1]->admit_peer(0));
  const auto copy = [&] {
    return x.devices[0]->copy_peer(&x.values[1], 1, &x.values[0], 0, 4, x.devices[0].stream);
  };
  x.plan->add({.kind = fault::fail, .on = verb::copy_peer, .device = 0, .peer = 1});
  x.plan->add({.kind = fault::hang, .on = verb::copy_peer, .device = 0, .peer = 1});
  EXPECT_TRUE(has_code(copy(), errc::cuda_error));
  EXPECT_TRUE(is_ok(copy()));
  x.record(0);
  EXPECT_TRUE(x.plan->wait_injected(fault::hang, 1, limit));
  EXPECT_FALSE(x.is_done(0));
  EXPECT_EQ(x.values[1], 2);
  x.plan->release();
  x.synchronize(0);
  EXPECT_EQ(x.values[1], 1);
}

TEST(FaultPlan, ACorruptCopyLosesOneByte) {
  std::set<std::size_t> places;
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    struck_world x{2, seed};
    must(x.devices[0]->enable_peer(1));
    must(x.devices[1]->admit_peer(0));
    x.plan->add({.kind = fault::corrupt, .on = verb::copy_peer});
    x.plan->add({.kind = fault::corrupt, .on = verb::copy});
    x.plan->add({.kind = fault::corrupt, .on = verb::fill}); // not applied to fills
    const std::vector<std::byte> source(100, std::byte{1});
    const auto lost = [&](auto copy) {
      std::vector<std::byte> target(100, std::byte{2});
      EXPECT_TRUE(is_ok(copy(target.data())));
      x.devices[0].drain();
      EXPECT_LE(std::count(target.begin(), target.end(), std::byte{2}), 1);
      return static_cast<std::size_t>(std::find(target.begin(), target.end(), std::byte{2}) -
                                      target.begin());
    };
    const auto peer = [&](std::byte* to) {
      return x.devices[0]->copy_peer(to, 1, source.data(), 0, 100, x.devices[0].stream);
    };
    places.insert(lost(peer));
    EXPECT_LT(*places.rbegin(), 100u);
    EXPECT_EQ(lost(peer), 100u);
    EXPECT_LT(lost([&](std::byte* to) {
                return x.devices[0]->copy(to, source.data(), 100, copy_direction::device_to_device,
                                          x.devices[0].stream);
              }),
              100u);
    EXPECT_EQ(lost([&](std::byte* to) {
                return x.devices[0]->fill(to, std::span{source}.first(1), 100, x.devices[0].stream);
              }),
              100u);
    EXPECT_EQ(x.plan->injected(fault::corrupt), 2u);
  }
  EXPECT_GT(places.size(), 1u);
}

TEST(FaultPlan, NamesItsVerbsAndFaults) {
  EXPECT_EQ(to_string(verb::open), "open");
  EXPECT_EQ(to_string(verb::record), "record");
  EXPECT_EQ(to_string(verb::collective), "collective");
  EXPECT_EQ(to_string(verb::destroy), "destroy");
  EXPECT_EQ(to_string(fault::fail), "fail");
  EXPECT_EQ(to_string(verb::copy_peer), "copy_peer");
  EXPECT_EQ(to_string(fault::poison), "poison");
  EXPECT_EQ(to_string(fault::corrupt), "corrupt");
}

} // namespace

} // namespace troupe
