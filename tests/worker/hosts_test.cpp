// Devices on other hosts, through everything above the backend.

#include "support/load.hpp"
#include "support/topology_fixture.hpp"
#include "worker/hosts_support.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

namespace troupe::testing {

namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

TROUPE_CHILD(host_agent_child) {
  host_agent_options what;
  what.parent = variable("TROUPE_AGENT_PARENT");
  what.identity = {variable("TROUPE_AGENT_CERT"), variable("TROUPE_AGENT_KEY"),
                   variable("TROUPE_AGENT_AUTHORITY")};
  what.name = variable("TROUPE_AGENT_NAME");
  what.devices = std::stoi(variable("TROUPE_AGENT_DEVICES"));
  what.retry_pause = std::chrono::milliseconds{100};
  static_cast<void>(worker_main(0, nullptr)); // its workers are this binary
  tell("ended", describe(run_host_agent(what)));
  return 1;
}

TEST(Hosts, SumOverAllDevices) {
  test_fleet fleet;
  test_system system{fleet.system()};
  ASSERT_EQ(system.devices(), 4);
  auto w = system.open_world();
  for (std::uint64_t seed = 1; seed <= 5; ++seed)
    EXPECT_TRUE(works(w, seed));
}

TEST(Hosts, AParentNeedsNoDevices) {
  test_fleet fleet{{.local = 0, .names = {"beta", "alpha"}}};
  test_system system{fleet.system()};
  ASSERT_EQ(system.devices(), 4);
  auto w = system.open_world();
  EXPECT_TRUE(works(w));
}

TEST(Hosts, HaveTheirDevicesInTheirOrder) {
  test_fleet fleet{{.local = 1, .names = {"beta", "alpha"}}};
  auto all = fleet.open();
  EXPECT_EQ(
      device_places(*all),
      (std::vector<device_place>{{"", 0}, {"beta", 0}, {"beta", 1}, {"alpha", 0}, {"alpha", 1}}));
}

TEST(Hosts, MoveContent) {
  test_fleet fleet;
  test_system system{fleet.system()};
  auto d = must(device::open(system, 3));
  EXPECT_TRUE(works(d));
  auto content = random_bytes(std::size_t{40} << 20, 7); // in pieces
  auto ref = must(answer_of(d.allocate(dtype::uint8, content.size())));
  put(d, ref, content);
  auto copy = must(answer_of(d.allocate(dtype::uint8, content.size())));
  ASSERT_TRUE(answer_of(d.copy(copy, ref)));
  EXPECT_TRUE(holds(d, copy, content));
  auto filled = must(d.allocate<float>(1000));
  ASSERT_TRUE(answer_of(d.fill(filled, 2.5F)));
  EXPECT_TRUE(holds(d, filled, std::vector<float>(1000, 2.5F)));
}

TEST(Hosts, PinnedMemoryGoesBothWays) {
  test_fleet fleet;
  test_system system{fleet.system()};
  auto d = must(device::open(system, 2));
  constexpr std::size_t size = std::size_t{3} << 20;
  auto from = must(d.allocate_pinned(size));
  auto to = must(d.allocate_pinned(size));
  auto ref = must(answer_of(d.allocate(dtype::uint8, size)));
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    const auto content = random_bytes(size, seed);
    std::copy(content.begin(), content.end(), from.writable().begin());
    ASSERT_TRUE(answer_of(d.upload(ref, from)));
    ASSERT_TRUE(answer_of(d.download(ref, to)));
    EXPECT_TRUE(std::equal(content.begin(), content.end(), to.bytes().begin(), to.bytes().end()));
  }
}

/// What goes from one device to another, passes through host memory of which each host has its own.
TEST(Hosts, CopyBetweenAnyTwoDevices) {
  test_fleet fleet{{.local = 2, .names = {"alpha", "beta"}}};
  test_system system{fleet.system()};
  auto t = open_topology(system);
  constexpr std::size_t size = (std::size_t{9} << 20) + 13;
  std::uint64_t seed = 0;
  for (auto [from, to] : all_pairs(system.ordinals())) {
    auto a = must(device::open(system, from));
    auto b = must(device::open(system, to));
    const auto content = random_bytes(size, ++seed);
    auto source = must(answer_of(a.allocate(dtype::uint8, size)));
    auto target = must(answer_of(b.allocate(dtype::uint8, size)));
    put(a, source, content);
    ASSERT_TRUE(is_ok(answer_of(t.copy(target, source)))) << from << " to " << to;
    EXPECT_TRUE(holds(b, target, content)) << from << " to " << to;
  }
}

} // namespace

} // namespace troupe::testing
