// A system that refuses new threads to the process. Every request returns its result or an error
// value. Nothing throws, the process does not end, and work continues when threads are available
// again.

#include "support/child_process.hpp"
#include "support/no_threads.hpp"
#include "support/world_fixture.hpp"

#include <caf/all.hpp>

#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace troupe::testing {
namespace {

/// An actor system whose devices have not been used.
struct untouched_system {
  untouched_system() : actors((must(settings.parse(arguments)), settings)) {}

  const std::vector<std::string> arguments{"--troupe.backend=host", "--troupe.devices=2"};
  config settings;
  caf::actor_system actors;
};

void expect_no_thread(const caf::error& why) {
  EXPECT_EQ(code_of(why), errc::unavailable);
  EXPECT_NE(describe(why).find("no thread"), std::string::npos) << describe(why);
}

TEST(NoThreads, DevicesAreRefused) {
  untouched_system owner;
  auto& system = owner.actors;
  {
    const no_threads held;
    expect_no_thread(error_of(list_devices(system)));
    expect_no_thread(error_of(device::open(system, 0)));
    expect_no_thread(error_of(world::open(system, {.devices = {0, 1}})));
    expect_no_thread(error_of(topology::open(system)));
  }
  auto w = must(world::open(system, {.devices = {0, 1}}));
  EXPECT_TRUE(works(w));
}

TEST(NoThreads, LanesAreRefused) {
  untouched_system owner;
  auto& system = owner.actors;
  must(list_devices(system));
  {
    const no_threads held;
    expect_no_thread(error_of(device::open(system, 1)));
    expect_no_thread(error_of(world::open(system, {.devices = {0, 1}})));
  }
  auto w = must(world::open(system, {.devices = {0, 1}}));
  EXPECT_TRUE(works(w));
}

TEST(NoThreads, LanesCopyHostMemoryThemselves) {
  test_system system;
  auto d = system.open();
  ASSERT_TRUE(moves(d, 1000)); // from now on the host backend's streams have threads
  const no_threads held;
  EXPECT_TRUE(moves(d, std::size_t{40} << 20)); // in pieces
}

TROUPE_CHILD(HasNoThreadForCallbacks) {
  std::atomic<int> called = 0;
  test_system system;
  auto d = system.open();
  auto ref = must(d.allocate<float>(10));
  must(answer_of(d.fill(ref, 0.F)));
  {
    const no_threads held;
    for (int i = 0; i < 3; ++i)
      d.fill(ref, 1.F).then([&](const auto& done) { called += done ? 1 : 100; });
    must(answer_of(d.fill(ref, 2.F)));
    EXPECT_EQ(called, 0);
  }
  flag last;
  d.fill(ref, 3.F).then([&](const auto&) { last.set(); });
  EXPECT_TRUE(last.wait());
  EXPECT_EQ(called, 3);
  return 0;
}

TEST(NoThreads, CallbacksWaitForOne) {
  const auto child = run_child("HasNoThreadForCallbacks", 2 * patience);
  EXPECT_EQ(child.status, 0) << to_string(child);
}

TEST(NoThreads, CallsOverHostMemoryAreRefusedForAllRanks) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system;
  auto w = system.open_world();
  auto ranks = must(mesh_comm::open(w));
  std::vector<std::vector<float>> values(ranks.size(), std::vector<float>(1000, 1.F));
  const auto sum = [&] {
    std::vector<pending<void>> all;
    for (std::size_t i = 0; i < ranks.size(); ++i)
      all.push_back(ranks[i].all_reduce(std::as_writable_bytes(std::span{values[i]}),
                                        dtype::float32, reduce_op::sum, {.deadline = patience}));
    return all;
  };
  {
    const no_threads held;
    for (auto& x : sum())
      expect_no_thread(error_of(answer_of(x)));
  }
  for (auto& x : values)
    EXPECT_EQ(x, std::vector<float>(1000, 1.F)) << "a call that was refused has summed";
  for (auto& x : sum())
    must(answer_of(x));
  for (auto& x : values)
    EXPECT_EQ(x, std::vector<float>(1000, static_cast<float>(ranks.size())));
}

TEST(NoThreads, WhatIsDoneInTheBackgroundHasOneThread) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system;
  auto w = system.open_world();
  auto links = must(topology::open(system));
  const auto verified = [&] {
    return is_ok(answer_of(links.verify_links({}, {.deadline = patience})));
  };
  EXPECT_TRUE(works(w));
  EXPECT_TRUE(verified());
  {
    const no_threads held;
    EXPECT_TRUE(verified());
    EXPECT_TRUE(works(w));
  }
  EXPECT_TRUE(works(w));
}

} // namespace
} // namespace troupe::testing
