/// Worlds share devices, and one world hangs. Only that world's communicator ends, and the error
/// names the rank at fault. The requests of the other worlds succeed, possibly later.

#include "support/world_fixture.hpp"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

constexpr std::size_t count = 1000;
constexpr int requests = 12;

/// A world and a client that drives it as fast as possible. Each request has its own memory.
struct driven_world {
  world over;
  std::vector<int> devices;
  std::vector<any_gpu_ref> send;
  std::vector<std::vector<any_gpu_ref>> recv;
  std::vector<caf::expected<collective_done>> answers;

  driven_world(world w, std::vector<int> on) : over(std::move(w)), devices(std::move(on)) {
    send = must(over.allocate(dtype::uint32, count));
    for (std::size_t rank = 0; rank < over.size(); ++rank)
      put(over.device_of(rank), send[rank], bytes_of(input(rank)));
    for (int i = 0; i < requests; ++i)
      recv.push_back(must(over.allocate(dtype::uint32, count, true)));
  }

  std::vector<std::uint32_t> input(std::size_t rank) const {
    std::vector<std::uint32_t> result(count);
    for (std::size_t i = 0; i < count; ++i)
      result[i] = static_cast<std::uint32_t>(i * (rank + 1) * 2'654'435'761U);
    return result;
  }

  std::vector<std::uint32_t> sum() const {
    std::vector<std::uint32_t> result(count);
    for (std::size_t rank = 0; rank < over.size(); ++rank) {
      auto x = input(rank);
      std::transform(x.begin(), x.end(), result.begin(), result.begin(), std::plus{});
    }
    return result;
  }

  void drive() {
    std::vector<pending<collective_done>> all;
    for (auto& r : recv)
      all.push_back(over.all_reduce(send, r));
    answers.clear();
    for (auto& x : all)
      answers.push_back(answer_of(x));
  }

  void expect_done(std::uint64_t epoch) const {
    for (std::size_t i = 0; i < answers.size(); ++i) {
      ASSERT_TRUE(is_ok(answers[i])) << over.status().name << ", request " << i;
      EXPECT_EQ(answers[i]->epoch, epoch);
      expect_right(i);
    }
  }

  void expect_right(std::size_t i) const {
    for (std::size_t rank = 0; rank < over.size(); ++rank)
      EXPECT_TRUE(holds(over.device_of(rank), recv[i][rank], sum())) << over.status().name;
  }

  std::size_t rank_on(int device) const {
    return static_cast<std::size_t>(std::find(devices.begin(), devices.end(), device) -
                                    devices.begin());
  }

  // INV-7, INV-12
  void expect_stalled(std::uint64_t epoch, std::optional<int> device) const {
    int stalled = 0;
    for (std::size_t i = 0; i < answers.size(); ++i) {
      if (answers[i]) { // before the stall, or in the next epoch
        expect_right(i);
        continue;
      }
      ++stalled;
      ASSERT_TRUE(has_code(answers[i], errc::stalled)) << over.status().name;
      auto why = *failure_of(answers[i].error());
      EXPECT_EQ(why.epoch, epoch);
      if (!device)
        continue;
      EXPECT_EQ(why.rank, static_cast<int>(rank_on(*device))) << describe(answers[i].error());
      EXPECT_EQ(why.device, *device);
    }
    EXPECT_GT(stalled, 0) << over.status().name;
  }
};

struct overlap_case {
  const char* name;
  standby_policy standby;
};

class Overlap : public ::testing::TestWithParam<overlap_case> {};

INSTANTIATE_TEST_SUITE_P(With, Overlap,
                         ::testing::Values(overlap_case{"NoStandby", standby_policy::none},
                                           overlap_case{"Standby", standby_policy::communicators}),
                         [](const auto& x) { return std::string{x.param.name}; });

TEST_P(Overlap, AStallEndsTheWorldWhoseRankStandsStill) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.devices = 4, .faults = plan}};
  world_limits limits;
  limits.stall_limit = 400ms; // far above the time of a collective on a busy machine
  limits.quiet_limit = 10s;
  limits.restarts = 1 << 20;
  limits.restart_backoff = 0ms;
  limits.standby = GetParam().standby;
  auto open = [&](std::string name, std::vector<int> devices) {
    return driven_world{
        system.open_world({.devices = devices, .name = std::move(name), .limits = limits}),
        devices};
  };
  std::vector<driven_world> worlds;
  worlds.push_back(open("left", {0, 1, 2}));
  worlds.push_back(open("right", {1, 2, 3}));
  auto groups = must(worlds[0].over.split("middle", {-1, 0, 0}));
  worlds.emplace_back(groups[0], std::vector{1, 2});
  // Only one world has device 0, and only one has device 3. A rank that is reported as issued but
  // never takes part cannot be distinguished from the others. A rank that waits behind a launch can
  // be named.
  struct round {
    std::vector<int> culprits;
    bool behind_a_launch;
  };
  const std::vector<round> rounds{{{0}, false}, {{3}, true},  {{0, 3}, false},
                                  {{0}, true},  {{3}, false}, {{0, 3}, true}};
  for (auto& [culprits, behind_a_launch] : rounds) {
    std::vector<std::uint64_t> epochs;
    for (auto& w : worlds) {
      w.drive();
      epochs.push_back(w.over.status().epoch);
      w.expect_done(epochs.back());
    }
    gate held;
    std::vector<pending<void>> launches;
    for (auto d : culprits) {
      auto& w = worlds[d == 0 ? 0 : 1];
      auto rank = w.rank_on(d);
      if (behind_a_launch)
        launches.push_back(held.hold_stream(w.over.device_of(rank), {}, {w.recv[0][rank]}));
      else
        plan->add({.kind = fault::not_issued, .on = verb::collective, .device = d});
    }
    std::vector<std::thread> clients;
    for (auto& w : worlds)
      clients.emplace_back([&w] { w.drive(); });
    for (auto& t : clients)
      t.join();
    held.open();
    for (auto& x : launches)
      EXPECT_TRUE(is_ok(answer_of(x)));
    for (std::size_t i = 0; i < worlds.size(); ++i) {
      auto& w = worlds[i];
      auto culprit =
          std::find_first_of(culprits.begin(), culprits.end(), w.devices.begin(), w.devices.end());
      if (culprit == culprits.end())
        w.expect_done(epochs[i]);
      else
        w.expect_stalled(epochs[i], behind_a_launch ? std::optional{*culprit} : std::nullopt);
    }
  }
}

} // namespace

} // namespace troupe::testing
