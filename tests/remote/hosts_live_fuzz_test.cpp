// Live traffic of a member that goes wrong harms no other member.

#include "remote/hosts_support.hpp"
#include "remote/mutating_wire.hpp"
#include "support/from_environment.hpp"
#include "support/load.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace troupe::testing {

namespace {

/// Uses a device in all kinds of ways until `stop`. Any request may fail. If work is not done in
/// time, because the word of that was lost, the wire hangs up.
void use(test_system& system, int ordinal, mutating_wire& wire, const std::atomic<bool>& stop) {
  constexpr std::size_t count = 10'000;
  const std::vector<float> data(count, 1.F);
  const request_options soon{.deadline = 1s};
  const auto done = [&](const auto& x) {
    if (has_code(x, errc::deadline_exceeded))
      wire.hang_up();
    return bool{is_ok(x ? caf::error{} : x.error())};
  };
  while (!stop) {
    auto d = device::open(system, ordinal, 1s);
    if (!d)
      continue;
    auto ref = d->allocate<float>(count, false, soon);
    auto number = d->allocate<std::int32_t>(1, false, soon);
    if (!done(ref) || !done(number))
      continue;
    std::vector<pending<void>> all;
    for (int i = 0; i < 100; ++i) {
      all.push_back(d->upload(*ref, std::span<const float>{data}, soon));
      all.push_back(d->fill(*ref, 2.F, soon));
      all.push_back(d->launch("tell the process", {}, {}, {*number}, soon));
    }
    for (auto& x : all)
      static_cast<void>(done(answer_of(x)));
    static_cast<void>(done(d->download(*ref, soon)));
    world_config both{.devices = {0, ordinal}};
    both.limits.restarts = 0;
    both.limits.build_deadline = 500ms;
    if (auto w = system.try_open_world(both))
      static_cast<void>(done(answer_of(w->barrier(soon))));
  }
}

TEST(HostLiveFuzz, AMemberWhoseFramesAreWrongHarmsOnlyItself) {
  test_fleet fleet{{.devices = 1, .retry_pause = 1ms}};
  std::optional<mutating_wire> wire;
  worker_backend_options how;
  how.backend = "host";
  how.host.devices = 2;
  how.workers.call_limit = 300ms;
  how.workers.start_limit = 2s;
  how.hosts = fleet.hosts();
  how.hosts.names = {"beta", "alpha"};
  how.hosts.link_limit = 1s;
  how.hosts.rejoin_limit = 20ms; // also the longest pause after a failure
  how.hosts.on_listening = [&](std::uint16_t port) {
    fleet.use_port(port);
    fleet.start_agent("beta");
    wire.emplace(fleet.authority(), "alpha", port, 1);
    fleet.use_port(wire->port());
    fleet.start_agent("alpha");
  };
  system_options options{.devices = 4, .wrap = [&](std::shared_ptr<backend>) {
                           return must(make_worker_backend(how));
                         }};
  options.lanes.open_attempts = 1'000'000'000;
  options.lanes.open_backoff = 0ms;
  test_system system{options};
  steady_adder sums{system.open_world({.devices = {0, 1, 2}})};
  const auto before = resident_memory();
  std::atomic<bool> stop{false};
  std::thread user{[&] { use(system, 3, *wire, stop); }};
  const auto frames = number_from_environment("TROUPE_FUZZ_FRAMES", 300);
  const std::chrono::seconds least{number_from_environment("TROUPE_FUZZ_SECONDS", 0)};
  const stopwatch watch;
  EXPECT_TRUE(eventually([&] { return wire->mutated() >= frames && watch.elapsed() >= least; },
                         least + 2 * patience));
  stop = true;
  user.join();
  EXPECT_LT(resident_memory(), before + 2 * memory_slack);
  RecordProperty("mutated", std::to_string(wire->mutated()));
  RecordProperty("connections", std::to_string(wire->connections()));

  wire->be_honest();
  device_feed feed{system, system.device_actor(3)};
  EXPECT_TRUE(eventually([&] { return bool{works(must(device::open(system, 3)))}; }));
  sums.end();
  auto all = system.open_world();
  EXPECT_TRUE(works(all));
}

} // namespace

} // namespace troupe::testing
