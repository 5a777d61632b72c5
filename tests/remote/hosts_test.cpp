// Devices on other hosts, used through all layers above the backend.

#include "net/socket.hpp"
#include "remote/hosts_support.hpp"
#include "remote/test_wire.hpp"
#include "support/load.hpp"
#include "support/parsed_config.hpp"
#include "support/topology_fixture.hpp"
#include "support/very_end.hpp"
#include "support/worker_losses.hpp"
#include <troupe/launch.hpp>
#include <troupe/worker_program.hpp>

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <sys/prctl.h>
#include <unistd.h>

namespace troupe::testing {

namespace {

/// Workers run the same binary, so the launches are registered there too.
const bool launches_registered = [] {
  auto error = register_launch("tell the process", [](launch_context& context, auto,
                                                      std::span<const any_gpu_ref> writes, auto) {
    auto to = writes.front().access();
    if (!to)
      return to.error();
    return context.run_on_host(
        [to = static_cast<std::int32_t*>(*to)] { *to = static_cast<std::int32_t>(::getpid()); });
  });
  if (!error)
    error = register_launch(
        "give a verdict",
        library_launch{.enqueue =
                           [](launch_context& context, auto&&...) {
                             return context.run_on_host([word = context.verdict()] { *word = 7; });
                           },
                       .judge =
                           [](std::int32_t x) {
                             return make_error(errc::invalid_argument, std::to_string(x));
                           }});
  if (!error) // and then waits for a message
    error = register_program("sum and tell", [](const program_place& place) {
      return place.system.spawn([place](caf::blocking_actor* self) {
        auto ref = place.rank.where().allocate<float>(64);
        if (!ref)
          return self->fail_state(ref.error());
        auto d = place.rank.where();
        if (auto done = d.fill(*ref, static_cast<float>(place.rank.index() + 1)).wait(); !done)
          return self->fail_state(done.error());
        if (auto done = place.rank.all_reduce(*ref, reduce_op::sum).wait(); !done)
          return self->fail_state(done.error());
        auto sum = d.download(*ref);
        if (!sum)
          return self->fail_state(sum.error());
        std::vector<std::uint8_t> bytes(sizeof(float));
        std::memcpy(bytes.data(), sum->data(), bytes.size());
        if (auto lost = place.report(std::move(bytes)))
          return self->fail_state(lost);
        self->receive([](const program_message&) {});
      });
    });
  return !error;
}();

/// Runs the installed agent program.
TROUPE_CHILD(host_tool_child) {
  auto text = [](const char* name) { return std::getenv(name); };
  ::execl(TROUPE_WORKER, TROUPE_WORKER, "--connect", text("TROUPE_AGENT_PARENT"), "--certificate",
          text("TROUPE_AGENT_CERT"), "--key", text("TROUPE_AGENT_KEY"), "--authority",
          text("TROUPE_AGENT_AUTHORITY"), "--name", text("TROUPE_AGENT_NAME"), "--devices",
          text("TROUPE_AGENT_DEVICES"), "--parent-name", "parent", nullptr);
  throw std::runtime_error("cannot start " TROUPE_WORKER);
}

/// As a user runs it: options of the program, and the installed agent program.
TEST(Hosts, JoinByOptions) {
  test_authority authority{"fleet"};
  const auto who = authority.issue("parent");
  parsed_config cfg{
      {"--troupe.placement=worker", "--troupe.devices=2", "--troupe.hosts.listen=127.0.0.1",
       "--troupe.hosts.certificate=" + who.certificate, "--troupe.hosts.key=" + who.key,
       "--troupe.hosts.authority=" + who.authority, "--troupe.hosts.names=alpha",
       "--troupe.hosts.join-limit=30", "--troupe.hosts.link-limit=2500"}};
  std::unique_ptr<running_child> agent;
  cfg.hosts.on_listening = [&](std::uint16_t port) {
    agent = std::make_unique<running_child>(
        "host_tool_child", agent_environment("alpha", authority.issue("alpha"),
                                             "127.0.0.1:" + std::to_string(port), 3));
  };
  caf::actor_system system{cfg};
  EXPECT_EQ(all_devices(system).size(), 5U);
  auto w = must(world::open(system, {.devices = all_devices(system)}));
  EXPECT_TRUE(works(w));
}

TEST(Hosts, AreNotWaitedForWithoutEnd) {
  test_authority authority{"fleet"};
  worker_backend_options how{.backend = "host", .host = {.devices = 1}};
  how.hosts.listen_address = "127.0.0.1";
  how.hosts.identity = authority.issue("parent");
  how.hosts.count = 2;
  how.hosts.join_limit = 200ms;
  const auto late = make_worker_backend(how);
  ASSERT_TRUE(has_code(late, errc::unavailable));
  EXPECT_EQ(describe(late.error()), "unavailable: 0 of 2 hosts joined within 200 ms");
  how.hosts.count = 0;
  how.hosts.names = {"alpha"};
  EXPECT_EQ(describe(make_worker_backend(how).error()),
            "unavailable: host alpha did not join within 200 ms");
  how.hosts.names = {"alpha", "beta"};
  EXPECT_EQ(describe(make_worker_backend(how).error()),
            "unavailable: hosts alpha, beta did not join within 200 ms");
}

// List of all devices, then a world over them: the wait for missing hosts happens once.
TEST(Hosts, ThatDoNotJoinAreWaitedForOnce) {
  test_authority authority{"fleet"};
  parsed_config cfg{{"--troupe.placement=worker", "--troupe.devices=1",
                     "--troupe.hosts.listen=127.0.0.1", "--troupe.hosts.names=alpha",
                     "--troupe.hosts.join-limit=1"}};
  cfg.hosts.identity = authority.issue("parent");
  int listened = 0;
  cfg.hosts.on_listening = [&](std::uint16_t) { ++listened; };
  caf::actor_system system{cfg};
  const auto w = world::open(system, {.devices = all_devices(system)});
  ASSERT_TRUE(has_code(w, errc::unavailable));
  EXPECT_EQ(describe(w.error()), "unavailable: host alpha did not join within 1 s");
  EXPECT_EQ(describe(list_devices(system).error()), describe(w.error()));
  EXPECT_EQ(listened, 1);
}

/// The program uses the hosts until it ends, and one host is lost at the end.
TROUPE_CHILD(UsesHostsUntilTheEnd) {
  auto* fleet = new test_fleet{{.local = 0, .names = {"alpha"}, .devices = 1}};
  auto* system = new test_system{fleet->system()};
  auto* gpu = new device{system->open()};
  at_the_very_end([=] {
    const std::vector<float> content(1 << 16, 3);
    const auto ref = must(gpu->allocate<float>(content.size()));
    must(answer_of(gpu->upload(ref, std::vector<float>{content})));
    tell("right", must(gpu->download(ref)) == content ? "yes" : "no");
    fleet->agent("alpha").kill();
    while (!ref.stale())
      std::this_thread::yield();
    fleet->agent("alpha").wait(patience);
    tell("lost");
  });
  return 7;
}

TEST(Hosts, AreUsedUntilTheProcessEnds) {
  // MALLOC_PERTURB_ overwrites freed memory, so that its later use is detected.
  const auto end = run_child("UsesHostsUntilTheEnd", patience, {"MALLOC_PERTURB_=165"});
  EXPECT_EQ(end.status, 7) << to_string(end);
  EXPECT_EQ(end.value("right"), "yes");
  EXPECT_TRUE(end.was_told("lost")) << to_string(end);
}

TEST(Hosts, AListenerThatThrowsIsAnError) {
  test_authority authority{"fleet"};
  worker_backend_options how{.backend = "host", .host = {.devices = 1}};
  how.hosts.listen_address = "127.0.0.1";
  how.hosts.identity = authority.issue("parent");
  how.hosts.names = {"alpha"};
  how.hosts.on_listening = [](std::uint16_t) { throw std::runtime_error("no agent starts"); };
  const auto made = make_worker_backend(how);
  ASSERT_TRUE(has_code(made, errc::unavailable));
  EXPECT_EQ(describe(made.error()),
            "unavailable: remote_hosts::on_listening threw: no agent starts");
}

TEST(Hosts, AnAddressThatIsInUseIsNamed) {
  test_authority authority{"fleet"};
  auto address = must(detail::address_from_string("127.0.0.1"));
  const auto other = must(detail::listen_at(address));
  worker_backend_options how{.backend = "host", .host = {.devices = 1}};
  how.hosts.listen_address = "127.0.0.1";
  how.hosts.port = address.port;
  how.hosts.identity = authority.issue("parent");
  how.hosts.count = 1;
  const auto made = make_worker_backend(how);
  ASSERT_TRUE(has_code(made, errc::unavailable));
  EXPECT_EQ(describe(made.error()), "unavailable: cannot listen on 127.0.0.1:" +
                                        std::to_string(address.port) + ": address already in use");
  EXPECT_EQ(failure_of(made.error())->native_code, EADDRINUSE);
}

TEST(Hosts, WrongOptionsAreTold) {
  test_authority authority{"fleet"};
  auto with = [&](auto change) {
    worker_backend_options how{.backend = "host", .host = {.devices = 1}};
    how.hosts.listen_address = "127.0.0.1";
    how.hosts.identity = authority.issue("parent");
    how.hosts.count = 1;
    change(how.hosts);
    auto made = make_worker_backend(how);
    return made ? errc{} : code_of(made.error()).value_or(errc::internal);
  };
  EXPECT_EQ(with([](auto& x) { x.count = 0; }), errc::invalid_argument);
  EXPECT_EQ(with([](auto& x) { x.listen_address = "0.0.0.0"; }), errc::invalid_argument);
  EXPECT_EQ(with([](auto& x) { x.listen_address = "localhost"; }), errc::invalid_argument);
  EXPECT_EQ(with([](auto& x) { x.identity.key = ""; }), errc::invalid_argument);
  EXPECT_EQ(with([](auto& x) { x.names = {"a", "b"}; }), errc::invalid_argument);
  EXPECT_EQ(with([](auto& x) { x.names = {"a b"}; }), errc::invalid_argument);
  EXPECT_EQ(with([](auto& x) { x.link_limit = 0s; }), errc::invalid_argument);
  host_agent_options agent{.parent = "127.0.0.1:1", .identity = authority.issue("agent")};
  agent.name = "no name";
  EXPECT_TRUE(has_code(run_host_agent(agent), errc::invalid_argument));
  agent.name = "name";
  agent.identity.authority = "/nowhere";
  EXPECT_TRUE(has_code(run_host_agent(agent), errc::invalid_argument));
  agent.parent = "127.0.0.1";
  EXPECT_TRUE(has_code(run_host_agent(agent), errc::invalid_argument));
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
  EXPECT_TRUE(moves(d, std::size_t{40} << 20)); // in pieces
  EXPECT_TRUE(other_memory{d}.is_there());
}

TEST(Hosts, KeepTheirDevices) {
  test_fleet fleet;
  test_system system{fleet.system()};
  auto d = must(device::open(system, 3));
  EXPECT_TRUE(has_code(answer_of(d.hand_over()), errc::not_supported));
  EXPECT_TRUE(works(d));
  EXPECT_EQ(must(answer_of(must(device::open(system, 0)).hand_over())), 2U);
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

/// A copy between two devices goes through host memory. Each host has its own copy of that memory.
/// The word of a verdict is in memory that a worker of another host does not share.
TEST(Hosts, RunNoLaunchThatHasAVerdict) {
  test_fleet fleet{{.local = 1, .devices = 1}};
  test_system system{fleet.system()};
  const std::vector<int> content{1, 2, 3};
  for (const int i : {0, 1}) {
    const auto d = system.open(i);
    const auto x = must(d.allocate<int>(content.size()));
    must(answer_of(d.upload(x, host_buffer{content})));
    const auto why = answer_of(d.launch("give a verdict", {}, {x}, {x}));
    if (i == 0) {
      EXPECT_TRUE(has_code(why, errc::invalid_argument));
      continue;
    }
    EXPECT_TRUE(has_code(why, errc::not_supported));
    EXPECT_TRUE(has_code(d.download(x), errc::skipped));
    accept_bytes(d, x);
    EXPECT_TRUE(holds(d, x, content));
  }
}

TEST(Hosts, CopyBetweenAnyTwoDevices) {
  test_fleet fleet{{.local = 1, .names = {"alpha", "beta"}}};
  test_system system{fleet.system()};
  auto t = open_topology(system);
  constexpr std::size_t size = (std::size_t{5} << 20) + 13;
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

/// Programs on the devices of other hosts.
TEST(Hosts, HaveProgramsOfTheirOwn) {
  test_fleet fleet{{.local = 1}};
  test_system system{fleet.system()};
  world_config config;
  config.devices = system.ordinals();
  config.program = {"sum and tell", {}};
  auto w = must(spawn_nccl_world(system, config));
  caf::scoped_actor self{system.get()};
  detail::send(self, w, subscribe{});
  std::map<int, float> sums;
  std::size_t ended = 0;
  for (bool late = false; !late && ended < 3;)
    self->receive([](const world_status&) {},
                  [&](const program_report& x) {
                    ASSERT_EQ(x.bytes.size(), sizeof(float));
                    std::memcpy(&sums[x.rank], x.bytes.data(), sizeof(float));
                    if (sums.size() == 3)
                      detail::send(self, w, program_message{-1, {1}});
                  },
                  [&](const program_ended& x) {
                    ++ended;
                    EXPECT_FALSE(x.why) << describe(x.why);
                  },
                  caf::after(patience) >> [&] { late = true; });
  EXPECT_EQ(sums, (std::map<int, float>{{0, 6.F}, {1, 6.F}, {2, 6.F}}));
  caf::anon_send_exit(w, caf::exit_reason::user_shutdown);
}

/// As many hosts as there are GPUs, at most four, with one GPU each.
TEST(Hosts, HaveGpus) {
  TROUPE_NEEDS_GPUS(1);
  std::vector<std::string> names{"alpha", "beta", "gamma", "delta"};
  names.resize(static_cast<std::size_t>(std::min(gpus_present(), 4)));
  test_fleet fleet{{.local = 0, .names = names, .devices = 1, .backend = "cuda"}};
  test_system system{fleet.system()};
  ASSERT_EQ(static_cast<std::size_t>(system.devices()), names.size());
  auto w = system.open_world();
  for (std::uint64_t seed = 1; seed <= 3; ++seed)
    EXPECT_TRUE(works(w, seed));
  const auto content = random_bytes((std::size_t{20} << 20) + 5, 7);
  for (std::size_t i = 0; i < w.size(); ++i)
    EXPECT_TRUE(moves(w.device_of(i), content.size()));
  if (w.size() > 1) {
    auto t = open_topology(system);
    auto from = must(answer_of(w.device_of(0).allocate(dtype::uint8, content.size())));
    auto to = must(answer_of(w.device_of(1).allocate(dtype::uint8, content.size())));
    put(w.device_of(0), from, content);
    ASSERT_TRUE(is_ok(answer_of(t.copy(to, from))));
    EXPECT_TRUE(holds(w.device_of(1), to, content));
  }
  // The last host is lost and comes back.
  const auto last = static_cast<int>(names.size()) - 1;
  device_feed feed{system, system.device_actor(last)};
  const auto before = feed.until(device_phase::ready).generation;
  fleet.agent(names.back()).kill();
  fleet.start_agent(names.back());
  feed.until(device_phase::ready, before + 1);
  EXPECT_TRUE(works(w));
}

// -- losses

world_config patient_config() {
  world_config result;
  result.limits.restarts = 1000;
  result.limits.restart_backoff = 1ms;
  return result;
}

TEST(HostLoss, AWorkerIsLostAlone) {
  ASSERT_TRUE(launches_registered);
  test_fleet fleet;
  test_system system{fleet.system()};
  auto w = system.open_world();
  const auto why = is_lost_alone(system, w, 3, 2, false);
  EXPECT_EQ(failure_of(why)->device, 3);
  EXPECT_NE(describe(why).find("on host alpha"), std::string::npos) << describe(why);
}

TEST(HostLoss, AnAgentThatIsKilledComesBack) {
  test_fleet fleet;
  test_system system{fleet.system()};
  auto w = system.open_world();
  device_feed feed{system, system.device_actor(2)};
  const other_memory kept{w.device_of(0)};
  auto lost = must(w.device_of(2).allocate<float>(1000));
  const auto before = feed.until(device_phase::ready).generation;
  const auto worker = worker_of(system, 2);
  const stopwatch watch;
  fleet.agent("alpha").kill();
  feed.until([&](const device_changed& x) { return x.phase != device_phase::ready; });
  EXPECT_LT(watch.elapsed(), at_once); // its connection ends with it
  EXPECT_TRUE(goes(worker, at_once));
  fleet.start_agent("alpha");
  EXPECT_EQ(feed.until(device_phase::ready, before + 1).generation, before + 1);
  EXPECT_TRUE(lost.stale());
  EXPECT_TRUE(works(w));
  EXPECT_TRUE(kept.is_there());
}

/// Adopts what a host's agent leaves. So the workers' process groups are not orphaned, and the
/// kernel does not continue those that are stopped.
TROUPE_CHILD(AdoptsStoppedWorkersOfAHost) {
  if (::prctl(PR_SET_CHILD_SUBREAPER, 1) != 0)
    return 1;
  const ledger book;
  test_fleet fleet{{.local = 1, .book = &book}};
  test_system system{fleet.system()};
  const auto running = worker_of(system, 1);
  const auto lost = worker_of(system, 2);
  book.halt();
  EXPECT_EQ(::kill(lost, SIGKILL), 0);
  const auto starting = book.wait(3).back();
  EXPECT_TRUE(eventually([&] { return state_of(starting) == 'T'; }));
  EXPECT_EQ(::kill(running, SIGSTOP), 0);
  fleet.agent("alpha").kill();
  for (const auto worker : {running, starting}) {
    EXPECT_TRUE(goes(worker, at_once));
    static_cast<void>(::kill(worker, SIGKILL)); // has no effect unless the test has failed
  }
  return 0;
}

TEST(HostLoss, AStoppedWorkerEndsWithItsAgent) {
  ASSERT_TRUE(launches_registered);
  const auto child = run_child("AdoptsStoppedWorkersOfAHost", 60s);
  EXPECT_EQ(child.status, 0) << to_string(child);
}

TEST(HostLoss, ACutIsSeenOnBothSides) {
  constexpr auto limit = 1s;
  std::optional<test_wire> wire;
  test_fleet fleet{{.link_limit = limit, .way = [&](std::uint16_t port) {
                      wire.emplace(port);
                      return wire->port();
                    }}};
  test_system system{fleet.system()};
  auto w = system.open_world();
  device_feed feed{system, system.device_actor(3)};
  const auto first = feed.until(device_phase::ready).generation;
  for (auto before = first; before < first + 3; ++before) {
    const auto x = lose_and_rejoin(
        system, 3, feed, before, limit, [&] { wire->cut(); }, [&] { wire->mend(); });
    EXPECT_EQ(x.generation, before + 1);
    EXPECT_TRUE(works(w));
  }
}

TEST(HostLoss, AnAgentThatStandsStillIsLost) {
  test_fleet fleet{{.link_limit = 500ms}};
  test_system system{fleet.system()};
  device_feed feed{system, system.device_actor(2)};
  feed.until(device_phase::ready);
  const stopwatch watch;
  fleet.agent("alpha").stop();
  feed.until([&](const device_changed& x) { return x.phase != device_phase::ready; });
  EXPECT_LT(watch.elapsed(), at_once);
}

TEST(HostLoss, NobodyWaitsForAHostWhenTheSystemEnds) {
  test_fleet fleet{{.rejoin_limit = 60s}};
  std::optional<test_system> system{std::in_place, fleet.system()};
  {
    device_feed feed{*system, system->device_actor(2)};
    feed.until(device_phase::ready);
    fleet.agent("alpha").kill();
    feed.until([&](const device_changed& x) { return x.phase != device_phase::ready; });
  }
  const stopwatch watch;
  system.reset();
  EXPECT_LT(watch.elapsed(), 3s); // the runtime gives up stuck work after 5 s
}

TEST(HostLoss, NobodyWaitsForAWorkerThatStartsOnAHost) {
  const ledger book;
  test_fleet fleet{{.local = 1, .book = &book}};
  std::optional<test_system> system{std::in_place, fleet.system()};
  {
    auto w = system->open_world();
    EXPECT_TRUE(works(w));
    const auto workers = book.wait(2);
    device_feed feed{*system, system->device_actor(2)};
    feed.until(device_phase::ready);
    book.hush();
    ASSERT_EQ(::kill(workers.back(), SIGKILL), 0);
    book.wait(3); // it hangs during its start
  }
  stopwatch watch;
  system.reset();
  EXPECT_LT(watch.elapsed(), 3s); // the runtime gives up stuck work after 5 s
  book.speak();
  watch = {};
  system.emplace(fleet.system()); // the agent does not wait for it either
  EXPECT_LT(watch.elapsed(), 5s);
  auto next = system->open_world();
  EXPECT_TRUE(works(next));
}

TEST(HostLoss, ASpareThatStartsOnAHostIsGivenUpWithItsDevice) {
  const ledger book;
  test_fleet fleet{{.local = 1, .book = &book}};
  std::optional<test_system> system{std::in_place, fleet.system()};
  auto config = patient_config();
  config.limits.standby = standby_policy::full;
  for (int i = 0; i < 3; ++i)
    must(device::open(*system, i));
  book.wait(2);
  book.hush();
  {
    auto w = system->open_world(config);
    EXPECT_TRUE(works(w));
    book.wait(3);
  }
  const stopwatch watch;
  system.reset();
  EXPECT_LT(watch.elapsed(), 3s);
}

TEST(HostLoss, AnAgentJoinsTheNextParent) {
  test_fleet fleet;
  pid_t worker = 0;
  {
    test_system system{fleet.system()};
    auto w = system.open_world();
    EXPECT_TRUE(works(w));
    worker = worker_of(system, 2);
  }
  EXPECT_TRUE(goes(worker, at_once));
  test_system system{fleet.system()};
  auto w = system.open_world();
  EXPECT_TRUE(works(w));
}

TEST(HostLoss, AWorldGoesOnUnderLoad) {
  constexpr int losses = 6;
  test_fleet fleet{{.local = 1, .names = {"alpha", "beta"}, .devices = 1}};
  test_system system{fleet.system()};
  auto w = system.open_world(patient_config());
  std::atomic<bool> stop = false;
  std::atomic<int> right = 0;
  std::thread client{[&] { add_up(w, stop, right); }};
  for (int i = 0; i < losses; ++i) {
    ASSERT_TRUE(goes_on(right, 3)) << "after " << i << " losses";
    if (i % 2 == 0) {
      EXPECT_EQ(code_of(kill_worker(w.device_of(1 + static_cast<std::size_t>(i) / 2 % 2))),
                errc::worker_lost);
    } else {
      const auto* name = i % 4 == 1 ? "alpha" : "beta";
      fleet.agent(name).kill();
      fleet.start_agent(name);
    }
  }
  ASSERT_TRUE(goes_on(right, 3));
  stop = true;
  client.join();
  EXPECT_TRUE(works(w));
}

TEST(HostLoss, ASpareOnAnotherHostTakesOver) {
  constexpr int kills = 3;
  test_fleet fleet{{.local = 1}};
  test_system system{fleet.system()};
  auto config = patient_config();
  config.limits.standby = standby_policy::full;
  auto w = system.open_world(config);
  world_feed feed{system, w.actor()};
  for (int i = 0; i < kills; ++i) {
    const auto before = feed.until(
        [](const world_status& x) { return x.phase == world_phase::ready && x.standby_ready; });
    spare_takes_over(w, feed, 1 + static_cast<std::size_t>(i) % 2, before, false);
    EXPECT_TRUE(works(w));
  }
}

} // namespace

} // namespace troupe::testing
