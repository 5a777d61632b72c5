// The topology, through its facade and as an actor.

#include "support/guarded_backend.hpp"
#include "support/topology_fixture.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <set>

namespace troupe::testing {
namespace {

using island_list = std::vector<std::vector<std::int32_t>>;
/// For EXPECT_TRUE: the graph is settled, and all of its links exist and are enabled.
::testing::AssertionResult all_enabled(const p2p_graph& graph, const std::vector<int>& devices) {
  if (!graph.settled)
    return ::testing::AssertionFailure() << "not settled";
  if (with_access(graph, peer_access::enabled) != all_pairs(devices) ||
      graph.links.size() != all_pairs(devices).size() || graph.devices.size() != devices.size())
    return ::testing::AssertionFailure() << caf::deep_to_string(graph);
  return ::testing::AssertionSuccess();
}

/// A topology without a facade. The destructor ends it.
class spawned_topology {
public:
  spawned_topology(test_system& system, topology_config config)
      : actor_(must(spawn_p2p_topology(system, std::move(config)))) {}
  ~spawned_topology() { caf::anon_send_exit(actor_, caf::exit_reason::user_shutdown); }
  spawned_topology(const spawned_topology&) = delete;
  spawned_topology& operator=(const spawned_topology&) = delete;

  const caf::actor& actor() const noexcept { return actor_; }

private:
  caf::actor actor_;
};

bool touches(const p2p_link& x, int device) { return x.from == device || x.to == device; }

// -- the graph

struct matrix {
  const char* name;
  int devices;
  pairs no_access;
  island_list islands;
};

void PrintTo(const matrix& x, std::ostream* out) { *out << x.name; }

class TopologyMatrix : public ::testing::TestWithParam<matrix> {};

INSTANTIATE_TEST_SUITE_P(
    Matrices, TopologyMatrix,
    ::testing::Values(
        matrix{"one", 1, {}, {{0}}}, matrix{"full", 4, {}, {{0, 1, 2, 3}}},
        matrix{"none", 3, all_pairs({0, 1, 2}), {{0}, {1}, {2}}},
        matrix{"asymmetric", 2, {{1, 0}}, {{0}, {1}}},
        matrix{"ring_one_way", 3, {{1, 0}, {2, 1}, {0, 2}}, {{0}, {1}, {2}}},
        matrix{"chain", 4, {{0, 2}, {2, 0}, {0, 3}, {3, 0}, {1, 3}, {3, 1}}, {{0, 1, 2, 3}}},
        matrix{"two_islands",
               5,
               {{0, 1},
                {1, 0},
                {0, 3},
                {3, 0},
                {1, 2},
                {2, 1},
                {2, 3},
                {3, 2},
                {1, 4},
                {4, 1},
                {3, 4},
                {4, 3}},
               {{0, 2, 4}, {1, 3}}},
        matrix{"bridge_one_way",
               4,
               {{0, 2}, {2, 0}, {0, 3}, {3, 0}, {1, 3}, {3, 1}, {2, 1}},
               {{0, 1}, {2, 3}}}),
    [](const auto& x) { return std::string{x.param.name}; });

TEST_P(TopologyMatrix, IsProbedAndEnabledInBothDirections) {
  TROUPE_HOST_ONLY("a peer matrix of the test's own");
  auto& want = GetParam();
  backend_books books;
  {
    test_system system{{.devices = want.devices,
                        .wrap = [&](auto inner) { return books.guard(std::move(inner)); },
                        .links = links_without(want.no_access)}};
    auto t = open_topology(system);
    auto graph = t.graph();
    EXPECT_TRUE(graph.settled);
    EXPECT_EQ(graph.name, "topology");
    EXPECT_EQ(with_access(graph, peer_access::none), want.no_access);
    EXPECT_EQ(with_access(graph, peer_access::enabled),
              without(all_pairs(system.ordinals()), want.no_access));
    EXPECT_EQ(graph.islands(), want.islands);
    ASSERT_EQ(graph.devices.size(), static_cast<std::size_t>(want.devices));
    for (int i = 0; i < want.devices; ++i) {
      auto& x = graph.devices[static_cast<std::size_t>(i)];
      EXPECT_EQ(x, (p2p_device{i, device_phase::ready, 1, x.island}));
      EXPECT_EQ(graph.device(i), &x);
    }
    for (auto& x : graph.links) {
      EXPECT_EQ(graph.link(x.from, x.to), &x);
      EXPECT_EQ(x.possible, !want.no_access.contains({x.from, x.to}));
      EXPECT_EQ(x.kind, x.possible ? link_kind::memory : link_kind::host);
      EXPECT_EQ(x.checked, link_check::unchecked);
      EXPECT_TRUE(is_ok(x.reason));
      EXPECT_EQ(x.bandwidth, 0);
    }
    EXPECT_EQ(graph.link(0, 0), nullptr);
    EXPECT_EQ(graph.link(0, want.devices), nullptr);
    EXPECT_EQ(graph.device(want.devices), nullptr);

    auto verified = must(answer_of(t.verify_links()));
    for (auto& x : verified.links) {
      EXPECT_EQ(x.checked, x.possible ? link_check::right : link_check::unchecked);
      EXPECT_EQ(x.access, x.possible ? peer_access::enabled : peer_access::none);
    }
    auto measured = must(answer_of(t.measure_links()));
    for (auto& x : measured.links) {
      bool back = measured.link(x.to, x.from)->possible;
      EXPECT_EQ(x.bandwidth > 0, x.possible);
      EXPECT_EQ(x.bandwidth_both > 0, x.possible && back);
      EXPECT_EQ(x.latency_us > 0, x.possible);
    }
    EXPECT_EQ(measured.islands(), want.islands);
  }
  EXPECT_TRUE(books.complaints().empty()) << books.complaints().front();
  EXPECT_EQ(books.number(backend_books::allocation), 0);
}

TEST(Topology, TellsWhatTheLinksAre) {
  TROUPE_HOST_ONLY("links of the test's own");
  test_system system{
      {.devices = 3,
       .links = {{.from = 0, .to = 1, .link = {link_kind::nvlink, 18, 0, true}},
                 {.from = 1, .to = 0, .link = {link_kind::nvlink, 17, 1, false}},
                 {.from = 0, .to = 2, .access = false, .link = {link_kind::pcie, 0, 3, false}}}}};
  auto graph = open_topology(system).graph();
  auto* x = graph.link(0, 1);
  EXPECT_EQ(x->kind, link_kind::nvlink);
  EXPECT_EQ(x->links, 18);
  EXPECT_EQ(x->performance_rank, 0);
  EXPECT_TRUE(x->native_atomics);
  x = graph.link(1, 0);
  EXPECT_EQ(x->links, 17);
  EXPECT_EQ(x->performance_rank, 1);
  EXPECT_FALSE(x->native_atomics);
  EXPECT_EQ(graph.link(0, 2)->kind, link_kind::pcie);
  EXPECT_EQ(graph.link(0, 2)->performance_rank, 3);
  EXPECT_EQ(graph.link(0, 2)->access, peer_access::none);
}

TEST(Topology, IsThereWhereNobodyCanTellWhatALinkIs) {
  TROUPE_HOST_ONLY("a link of the test's own");
  auto plan = std::make_shared<fault_plan>();
  plan->add({.kind = fault::fail, .on = verb::link, .device = 1, .peer = 0});
  test_system system{{.faults = plan}};
  auto graph = open_topology(system).graph();
  EXPECT_TRUE(all_enabled(graph, {0, 1}));
  EXPECT_EQ(graph.link(1, 0)->kind, link_kind::host);
  EXPECT_EQ(graph.link(0, 1)->kind, link_kind::memory);
}

TEST(Topology, OverSomeOfTheDevices) {
  TROUPE_NEEDS_DEVICES(3);
  test_system system{{.devices = 4}};
  auto config = quick_config();
  config.devices = {2, 0};
  config.name = "some";
  auto t = open_topology(system, config);
  EXPECT_EQ(t.graph().name, "some");
  ASSERT_EQ(t.graph().devices.size(), 2u);
  EXPECT_EQ(t.graph().devices[0].device, 0);
  EXPECT_EQ(t.graph().devices[1].device, 2);
  EXPECT_EQ(t.graph().links.size(), 2u);
  EXPECT_TRUE(has_code(answer_of(t.verify_links({1, 2})), errc::invalid_argument));
  for (auto& x : must(answer_of(t.verify_links({2, 0, 2}))).links)
    EXPECT_EQ(x.checked, x.possible ? link_check::right : link_check::unchecked);
}

TEST(Topology, OverDevicesOfTheApplication) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system;
  auto t = must(topology::open(std::vector{system.open(1), system.open(0)}, quick_config()));
  EXPECT_EQ(t.graph().devices.size(), 2u);
  EXPECT_TRUE(has_code(topology::open(std::vector<device>{}), errc::invalid_argument));
  test_system other{{.devices = 1}};
  if (!on_cuda()) { // a GPU belongs to one system at a time
    EXPECT_TRUE(has_code(topology::open(std::vector{system.open(0), other.open(0)}),
                         errc::invalid_argument));
  }
}

TEST(Topology, RefusesWhatCanNeverBe) {
  test_system system{{.devices = 1}};
  auto with = [&](std::vector<int> devices) {
    auto config = quick_config();
    config.devices = std::move(devices);
    return config;
  };
  for (auto& devices : std::vector<std::vector<int>>{{system.no_device()}, {0, -1}, {0, 0}}) {
    EXPECT_TRUE(has_code(topology::open(system, with(devices)), errc::invalid_argument));
    EXPECT_TRUE(has_code(spawn_p2p_topology(system, with(devices)), errc::invalid_argument));
  }
  for (auto wrong : {&topology_limits::pattern_bytes, &topology_limits::measured_bytes}) {
    auto config = with({0});
    config.limits.*wrong = 0;
    EXPECT_TRUE(has_code(topology::open(system, config), errc::invalid_argument));
  }
  auto t = open_topology(system, with({0}));
  for (int unknown : {system.no_device(), -1}) {
    auto refused = answer_of(t.verify_links({0, unknown}));
    ASSERT_TRUE(has_code(refused, errc::invalid_argument));
    EXPECT_EQ(failure_of(refused.error())->device, unknown);
    EXPECT_EQ(failure_of(refused.error())->verb, "verify_links");
    EXPECT_TRUE(has_code(answer_of(t.measure_links({unknown})), errc::invalid_argument));
    EXPECT_TRUE(has_code(ask<p2p_graph>(system, t.actor(), verify_links{{unknown}, {}}),
                         errc::invalid_argument));
  }
  EXPECT_TRUE(is_ok(answer_of(t.verify_links({0}))));
}

// -- by messages

TEST(Topology, UnderstandsMessages) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system;
  auto config = quick_config();
  config.devices = system.ordinals();
  spawned_topology t{system, config};
  auto& actor = t.actor();
  {
    graph_feed feed{system, actor};
    auto settled = feed.until([](const p2p_graph& x) { return x.settled; });
    EXPECT_EQ(settled.devices.size(), 2u);
    // The current graph first, then each change once.
    for (std::size_t i = 1; i < feed.seen().size(); ++i)
      EXPECT_LT(feed.seen()[i - 1].version, feed.seen()[i].version);
    EXPECT_EQ(must(ask<p2p_graph>(system, actor, get_graph{})).devices, settled.devices);
    auto verified = must(ask<p2p_graph>(system, actor, verify_links{}));
    for (auto& x : verified.links)
      EXPECT_EQ(x.checked, x.possible ? link_check::right : link_check::unchecked);
    auto told = feed.until([&](const p2p_graph& x) { return x.version >= verified.version; });
    EXPECT_EQ(told.links.front().checked, verified.links.front().checked);
    auto measured = must(ask<p2p_graph>(system, actor, measure_links{{0, 1}, {}}));
    for (auto& x : measured.links)
      EXPECT_EQ(x.bandwidth > 0, x.access == peer_access::enabled);
  }
  caf::scoped_actor self{system.get()};
  detail::send(self, actor, shutdown{});
  self->wait_for(actor);
  EXPECT_FALSE(static_cast<bool>(ask<p2p_graph>(system, actor, get_graph{})));
}

class topology_client final : public detail::actor_base<> {
public:
  topology_client(caf::actor_config& cfg, std::vector<int> devices, std::shared_ptr<flag> refused)
      : actor_base(cfg), devices_(std::move(devices)), refused_(std::move(refused)) {}

  caf::behavior make_behavior() override {
    topology_config config;
    config.devices = devices_;
    if (has_code(topology::open(system(), config), errc::would_block))
      refused_->set();
    return {};
  }

private:
  std::vector<int> devices_;
  std::shared_ptr<flag> refused_;
};

TEST(Topology, IsNotOpenedInAnActorOfThePool) {
  test_system system{{.devices = 1}};
  auto refused = std::make_shared<flag>();
  system.get().spawn<topology_client>(system.ordinals(), refused);
  EXPECT_TRUE(refused->wait());
}

// -- failures of links

TEST(Topology, ALinkThatCannotBeEnabledSaysSo) {
  TROUPE_HOST_ONLY("faults");
  for (auto on : {verb::enable_peer, verb::admit_peer}) {
    auto plan = std::make_shared<fault_plan>();
    // Device 0 enables the link from 0 to 1, and device 1 admits it.
    bool enables = on == verb::enable_peer;
    plan->add({.kind = fault::fail,
               .on = on,
               .device = enables ? 0 : 1,
               .times = 2,
               .peer = enables ? 1 : 0});
    test_system system{{.devices = 3, .faults = plan}};
    auto t = open_topology(system);
    auto graph = t.graph();
    EXPECT_TRUE(graph.settled);
    EXPECT_EQ(with_access(graph, peer_access::failed), (pairs{{0, 1}}));
    EXPECT_EQ(with_access(graph, peer_access::enabled), without(all_pairs({0, 1, 2}), {{0, 1}}));
    EXPECT_TRUE(has_code(graph.link(0, 1)->reason, errc::cuda_error));
    EXPECT_TRUE(graph.link(0, 1)->possible);
    EXPECT_EQ(graph.islands(), (island_list{{0, 1, 2}})); // connected through device 2
    // A later request tries the link again. The first one fails, the second one succeeds.
    EXPECT_EQ(with_access(must(answer_of(t.verify_links())), peer_access::failed), (pairs{{0, 1}}));
    EXPECT_EQ(t.graph().link(0, 1)->checked, link_check::unchecked);
    EXPECT_EQ(t.graph().link(1, 0)->checked, link_check::right);
    EXPECT_TRUE(all_enabled(must(answer_of(t.verify_links())), {0, 1, 2}));
    EXPECT_EQ(t.graph().link(0, 1)->checked, link_check::right);
  }
}

/// How a link fails after it was enabled.
class TopologyFaults : public ::testing::TestWithParam<fault> {};

INSTANTIATE_TEST_SUITE_P(Kinds, TopologyFaults, ::testing::Values(fault::corrupt, fault::fail),
                         [](const auto& x) { return std::string{to_string(x.param)}; });

TEST_P(TopologyFaults, ALinkThatIsNotRightIsTakenOutAndReported) {
  TROUPE_HOST_ONLY("the matrix of three devices");
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    for (std::uint64_t first = 1; first <= 4; ++first) { // one of the four copies of a check
      auto plan = std::make_shared<fault_plan>(seed);
      test_system system{{.devices = 3, .faults = plan}};
      auto t = open_topology(system);
      graph_feed feed{system, t.actor()};
      plan->add(
          {.kind = GetParam(), .on = verb::copy_peer, .device = 2, .first = first, .peer = 0});
      auto graph = must(answer_of(t.verify_links()));
      EXPECT_EQ(plan->injected(GetParam()), 1u);
      EXPECT_EQ(with_access(graph, peer_access::failed), (pairs{{2, 0}}));
      auto* bad = graph.link(2, 0);
      EXPECT_EQ(bad->checked, link_check::wrong);
      EXPECT_TRUE(has_code(bad->reason, errc::link_failed));
      EXPECT_EQ(failure_of(bad->reason)->device, 2);
      EXPECT_FALSE(failure_of(bad->reason)->detail.empty());
      for (auto& x : graph.links)
        EXPECT_EQ(x.checked, &x == bad ? link_check::wrong : link_check::right)
            << x.from << " to " << x.to;
      feed.until([](const p2p_graph& x) { return x.link(2, 0)->access == peer_access::failed; });
      // A failed link stays out until a check succeeds, even after a reset of its device.
      must(answer_of(system.open(2).reset()));
      feed.until([](const p2p_graph& x) {
        return x.settled && x.device(2) != nullptr && x.device(2)->generation == 2;
      });
      EXPECT_EQ(with_access(t.graph(), peer_access::failed), (pairs{{2, 0}}));
      EXPECT_TRUE(all_enabled(must(answer_of(t.verify_links({2, 0}))), {0, 1, 2}));
      EXPECT_EQ(t.graph().link(2, 0)->checked, link_check::right);
      EXPECT_TRUE(is_ok(t.graph().link(2, 0)->reason));
    }
  }
}

TEST_P(TopologyFaults, ANewLinkIsTrustedOnlyWhenItIsRight) {
  TROUPE_HOST_ONLY("the matrix of three devices");
  auto plan = std::make_shared<fault_plan>(3);
  plan->add({.kind = GetParam(), .on = verb::copy_peer, .device = 1, .peer = 2});
  test_system system{{.devices = 3, .faults = plan}};
  auto config = quick_config(true);
  config.devices = system.ordinals();
  spawned_topology t{system, config};
  graph_feed feed{system, t.actor()};
  auto graph = feed.until([](const p2p_graph& x) { return x.settled; });
  EXPECT_EQ(with_access(graph, peer_access::failed), (pairs{{1, 2}}));
  EXPECT_TRUE(has_code(graph.link(1, 2)->reason, errc::link_failed));
  for (auto& told : feed.seen())
    for (auto& x : told.links) {
      EXPECT_TRUE(x.access != peer_access::enabled || x.checked == link_check::right);
      EXPECT_FALSE(x.from == 1 && x.to == 2 && x.access == peer_access::enabled);
    }
  // After a reset the link is pending until it has been checked again.
  plan->add({.kind = fault::hang, .on = verb::copy_peer, .device = 0});
  must(answer_of(system.open(0).reset()));
  ASSERT_TRUE(plan->wait_injected(fault::hang, 1, patience));
  feed.until([](const p2p_graph& x) {
    return !x.settled && x.link(0, 1)->access == peer_access::pending &&
           x.device(0)->generation == 2;
  });
  plan->release();
  graph = feed.until([](const p2p_graph& x) { return x.settled && x.device(0)->generation == 2; });
  EXPECT_EQ(with_access(graph, peer_access::failed), (pairs{{1, 2}}));
  EXPECT_EQ(with_access(graph, peer_access::enabled), without(all_pairs({0, 1, 2}), {{1, 2}}));
}

TEST(Topology, ANewLinkThatCannotBeCheckedIsOut) {
  TROUPE_HOST_ONLY("devices with little memory");
  test_system system{{.bytes_per_device = 20'000}};
  auto all = must(answer_of(system.open(1).allocate(dtype::uint8, 15'000)));
  auto t = open_topology(system, quick_config(true));
  for (auto& x : t.graph().links) {
    EXPECT_EQ(x.access, peer_access::failed);
    EXPECT_EQ(x.checked, link_check::unchecked);
    EXPECT_TRUE(has_code(x.reason, errc::out_of_memory));
  }
  EXPECT_EQ(t.graph().islands(), (island_list{{0}, {1}}));
  EXPECT_TRUE(has_code(answer_of(t.verify_links()), errc::out_of_memory));
  EXPECT_EQ(must(answer_of(t.measure_links())).link(0, 1)->bandwidth, 0); // nothing to measure
}

TEST(Topology, AMeasurementTakesALinkOutThatFails) {
  TROUPE_HOST_ONLY("faults");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.devices = 3, .faults = plan}};
  auto t = open_topology(system);
  plan->add({.kind = fault::fail, .on = verb::copy_peer, .device = 0, .first = 3, .peer = 1});
  auto measured = answer_of(t.measure_links());
  EXPECT_TRUE(has_code(measured, errc::link_failed));
  auto graph = t.graph();
  EXPECT_EQ(with_access(graph, peer_access::failed), (pairs{{0, 1}}));
  EXPECT_EQ(graph.link(0, 1)->bandwidth, 0);
  for (auto& x : graph.links)
    if (x.access == peer_access::enabled) {
      EXPECT_GT(x.bandwidth, 0);
      EXPECT_GT(x.latency_us, 0);
    }
}

// -- generations of devices

TEST(Topology, EnablesAccessAgainAfterAReset) {
  TROUPE_HOST_ONLY("faults");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.devices = 3, .faults = plan}};
  auto t = open_topology(system);
  graph_feed feed{system, t.actor()};
  plan->add({.kind = fault::block, .on = verb::enable_peer, .device = 1, .peer = 2});
  must(answer_of(system.open(1).reset()));
  ASSERT_TRUE(plan->wait_injected(fault::block, 1, patience));
  // Access is enabled without a request, but not yet.
  auto graph = feed.until([](const p2p_graph& x) { return x.device(1)->generation == 2; });
  EXPECT_FALSE(graph.settled);
  for (auto& x : graph.links)
    EXPECT_EQ(x.access, touches(x, 1) ? peer_access::pending : peer_access::enabled);
  EXPECT_EQ(graph.islands(), (island_list{{0, 1, 2}}));
  plan->release();
  graph = feed.until([](const p2p_graph& x) { return x.settled && x.device(1)->generation == 2; });
  EXPECT_TRUE(all_enabled(graph, {0, 1, 2}));
  for (int i = 0; i < 5; ++i)
    for (int device : system.ordinals())
      must(answer_of(system.open(device).reset()));
  graph = feed.until([](const p2p_graph& x) {
    return x.settled && x.device(0)->generation == 6 && x.device(1)->generation == 7 &&
           x.device(2)->generation == 6;
  });
  EXPECT_TRUE(all_enabled(graph, {0, 1, 2}));
  EXPECT_EQ(must(answer_of(t.verify_links())).link(2, 1)->checked, link_check::right);
}

TEST(Topology, AccessThatFailsAfterAResetSaysSo) {
  TROUPE_HOST_ONLY("faults");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.faults = plan}};
  auto t = open_topology(system);
  graph_feed feed{system, t.actor()};
  plan->add({.kind = fault::fail, .on = verb::enable_peer, .device = 0, .peer = 1});
  auto d = system.open(0);
  must(answer_of(d.reset()));
  auto in_life = [](std::uint64_t generation) {
    return [generation](const p2p_graph& x) {
      return x.settled && x.device(0)->generation == generation;
    };
  };
  EXPECT_EQ(with_access(feed.until(in_life(2)), peer_access::failed), (pairs{{0, 1}}));
  must(answer_of(d.reset()));
  EXPECT_TRUE(all_enabled(feed.until(in_life(3)), {0, 1}));
}

TEST(Topology, AResetInTheMiddleOfATestAnswersIt) {
  TROUPE_HOST_ONLY("faults");
  for (int end : {0, 1}) {
    auto plan = std::make_shared<fault_plan>();
    test_system system{{.faults = plan}};
    auto t = open_topology(system);
    graph_feed feed{system, t.actor()};
    plan->add({.kind = fault::hang, .on = verb::copy_peer, .device = 0});
    auto verified = t.verify_links();
    ASSERT_TRUE(plan->wait_injected(fault::hang, 1, patience));
    auto reset = system.open(end).reset();
    stopwatch watch;
    EXPECT_TRUE(has_code(answer_of(verified), errc::device_reset));
    EXPECT_LT(watch.elapsed(), at_once);
    EXPECT_FALSE(reset.ready()); // the copy's memory still exists
    plan->release();
    EXPECT_TRUE(is_ok(answer_of(reset)));
    auto graph =
        feed.until([&](const p2p_graph& x) { return x.settled && x.device(end)->generation == 2; });
    EXPECT_TRUE(all_enabled(graph, {0, 1}));
    EXPECT_EQ(graph.link(0, 1)->checked, link_check::unchecked);
    EXPECT_TRUE(is_ok(answer_of(t.verify_links())));
    EXPECT_TRUE(works(system.open(end)));
  }
}

TEST(Topology, ADeviceThatIsShutDownLeaves) {
  TROUPE_NEEDS_DEVICES(3);
  test_system system{{.devices = 3}};
  auto t = open_topology(system);
  auto before = t.graph();
  graph_feed feed{system, t.actor()};
  system.open(1).shutdown();
  auto graph = feed.until([](const p2p_graph& x) { return x.settled && x.device(1) == nullptr; });
  ASSERT_EQ(graph.devices.size(), 2u);
  ASSERT_EQ(graph.links.size(), 2u);
  for (auto& x : graph.links) {
    EXPECT_FALSE(touches(x, 1));
    EXPECT_EQ(x.access, before.link(x.from, x.to)->access);
  }
  auto refused = answer_of(t.verify_links({0, 1}));
  EXPECT_TRUE(has_code(refused, errc::unavailable));
  EXPECT_EQ(failure_of(refused.error())->device, 1);
  EXPECT_TRUE(is_ok(answer_of(t.verify_links())));
  EXPECT_TRUE(is_ok(answer_of(t.measure_links())));
}

TEST(Topology, ADeviceThatFailsLeaves) {
  TROUPE_HOST_ONLY("faults");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.devices = 3, .faults = plan}};
  auto t = open_topology(system);
  graph_feed feed{system, t.actor()};
  plan->add({.kind = fault::fail, .on = verb::open_memory, .device = 2});
  EXPECT_FALSE(static_cast<bool>(answer_of(system.open(2).reset())));
  feed.until([](const p2p_graph& x) { return x.settled && x.device(2) == nullptr; });
  EXPECT_TRUE(all_enabled(t.graph(), {0, 1}));
  EXPECT_EQ(t.graph().islands(), (island_list{{0, 1}}));
}

TEST(Topology, ADeviceThatLeavesInTheMiddleOfATestAnswersIt) {
  TROUPE_HOST_ONLY("faults");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.devices = 3, .faults = plan}};
  auto t = open_topology(system);
  plan->add({.kind = fault::hang, .on = verb::copy_peer, .device = 0, .peer = 1});
  auto measured = t.measure_links();
  ASSERT_TRUE(plan->wait_injected(fault::hang, 1, patience));
  system.open(1).shutdown();
  plan->release();
  EXPECT_TRUE(has_code(answer_of(measured), errc::unavailable));
  EXPECT_GT(t.graph().link(0, 2)->bandwidth, 0); // the other links were measured
  EXPECT_GT(t.graph().link(2, 0)->bandwidth, 0);
  EXPECT_TRUE(all_enabled(t.graph(), {0, 2}));
}

TEST(Topology, OpensWithTheDevicesThatComeUp) {
  TROUPE_HOST_ONLY("faults");
  auto plan = std::make_shared<fault_plan>();
  plan->add({.kind = fault::fail, .on = verb::bind, .device = 1, .times = forever});
  test_system system{
      {.devices = 3, .faults = plan, .lanes = {.open_attempts = 2, .open_backoff = 1ms}}};
  auto t = open_topology(system);
  EXPECT_TRUE(all_enabled(t.graph(), {0, 2}));
  auto alone = quick_config();
  alone.devices = {1};
  EXPECT_TRUE(has_code(topology::open(system, alone), errc::device_failed));
}

TEST(Topology, OpensInTimeOrNotAtAll) {
  TROUPE_HOST_ONLY("faults");
  auto plan = std::make_shared<fault_plan>();
  plan->add({.kind = fault::block, .on = verb::bind, .device = 1});
  test_system system{{.faults = plan}};
  auto config = quick_config();
  config.devices = system.ordinals();
  config.limits.open_deadline = 50ms;
  auto late = topology::open(system, config);
  ASSERT_TRUE(has_code(late, errc::deadline_exceeded));
  const auto text = describe(late.error()); // may name device 0 too
  EXPECT_TRUE(text.find("device 1") != text.npos || text.find(", 1") != text.npos) << text;
  plan->release();
  EXPECT_TRUE(all_enabled(open_topology(system).graph(), {0, 1}));
}

TEST(Topology, AFaultAnswersEverything) {
  TROUPE_HOST_ONLY("faults");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.devices = 3, .faults = plan}};
  auto t = open_topology(system);
  graph_feed feed{system, t.actor()};
  plan->add({.kind = fault::hang, .on = verb::copy_peer, .device = 0});
  auto verified = t.verify_links();
  auto measured = t.measure_links();
  ASSERT_TRUE(plan->wait_injected(fault::hang, 1, patience));
  plan->poison();
  EXPECT_TRUE(has_code(answer_of(verified), errc::device_fault));
  EXPECT_TRUE(has_code(answer_of(measured), errc::device_fault));
  feed.until([](const p2p_graph& x) { return x.devices.empty(); });
  EXPECT_TRUE(t.graph().links.empty());
}

// -- requests

// INV-1
TEST(Topology, KeepsDeadlines) {
  TROUPE_HOST_ONLY("faults");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.faults = plan}};
  auto t = open_topology(system);
  EXPECT_TRUE(has_code(answer_of(t.verify_links({}, {.deadline = 1ns})), errc::deadline_exceeded));
  plan->add({.kind = fault::hang, .on = verb::copy_peer, .device = 1});
  auto limit = 150ms;
  auto verified = t.verify_links({}, {.deadline = limit});
  auto behind = t.measure_links({}, {.deadline = limit}); // waits for its turn
  EXPECT_TRUE(has_code(answer_of(verified), errc::deadline_exceeded));
  EXPECT_TRUE(has_code(answer_of(behind), errc::deadline_exceeded));
  EXPECT_EQ(plan->injected(fault::hang), 1u);
  plan->release();
  EXPECT_TRUE(is_ok(answer_of(t.verify_links())));
  EXPECT_TRUE(all_enabled(t.graph(), {0, 1}));
}

TEST(Topology, ALinkThatHangsInItsFirstCheckIsOut) {
  TROUPE_HOST_ONLY("faults");
  auto plan = std::make_shared<fault_plan>();
  plan->add({.kind = fault::hang, .on = verb::copy_peer, .device = 0, .peer = 1});
  test_system system{{.faults = plan}};
  auto config = quick_config(true);
  config.limits.deadline = 100ms;
  auto t = open_topology(system, config);
  EXPECT_TRUE(has_code(t.graph().link(0, 1)->reason, errc::deadline_exceeded));
  EXPECT_EQ(t.graph().link(0, 1)->access, peer_access::failed);
  plan->release();
  EXPECT_TRUE(all_enabled(must(answer_of(t.verify_links({}, {.deadline = patience}))), {0, 1}));
}

TEST(Topology, ARequestCanBeTakenBack) {
  TROUPE_HOST_ONLY("faults");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.faults = plan}};
  auto t = open_topology(system);
  plan->add({.kind = fault::hang, .on = verb::copy_peer, .device = 0});
  auto verified = t.verify_links();
  ASSERT_TRUE(plan->wait_injected(fault::hang, 1, patience));
  verified.cancel();
  EXPECT_TRUE(has_code(answer_of(verified), errc::cancelled));
  plan->release();
  EXPECT_TRUE(is_ok(answer_of(t.verify_links())));
}

TEST(Topology, RequestsTakeTurns) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system;
  auto t = open_topology(system);
  std::vector<pending<p2p_graph>> all;
  for (int i = 0; i < 4; ++i) {
    all.push_back(t.verify_links());
    all.push_back(t.measure_links());
  }
  for (auto& x : all)
    EXPECT_TRUE(is_ok(answer_of(x)));
}

TEST(Topology, ItsEndAnswersItsRequests) {
  TROUPE_HOST_ONLY("faults");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.faults = plan}};
  std::optional<topology> t{open_topology(system)};
  plan->add({.kind = fault::hang, .on = verb::copy_peer, .device = 0});
  auto verified = t->verify_links();
  ASSERT_TRUE(plan->wait_injected(fault::hang, 1, patience));
  t.reset();
  EXPECT_TRUE(has_code(answer_of(verified), errc::unavailable));
  plan->release();
  EXPECT_TRUE(all_enabled(open_topology(system).graph(), {0, 1}));
}

TEST(Topology, TheSystemEndsInTheMiddleOfATest) {
  TROUPE_HOST_ONLY("faults");
  auto plan = std::make_shared<fault_plan>();
  std::optional<pending<p2p_graph>> verified;
  {
    test_system system{{.faults = plan}};
    auto t = open_topology(system, quick_config(true));
    plan->add({.kind = fault::slow, .on = verb::copy_peer, .times = forever, .delay = 20ms});
    verified = t.verify_links();
    ASSERT_TRUE(plan->wait_injected(fault::slow, 1, patience));
  }
  EXPECT_TRUE(has_code(answer_of(*verified), errc::unavailable));
}

TEST(Topology, TwoOverTheSameDevices) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system;
  auto first = open_topology(system);
  std::optional<topology> second{open_topology(system, quick_config(true))};
  auto want = with_access(first.graph(), peer_access::enabled);
  EXPECT_EQ(with_access(second->graph(), peer_access::enabled), want);
  graph_feed of_first{system, first.actor()};
  graph_feed of_second{system, second->actor()};
  auto one = first.verify_links();
  auto other = second->measure_links();
  EXPECT_TRUE(is_ok(answer_of(one)));
  EXPECT_TRUE(is_ok(answer_of(other)));
  must(answer_of(system.open(0).reset()));
  for (auto* feed : {&of_first, &of_second})
    EXPECT_EQ(with_access(feed->until([](const p2p_graph& x) {
                return x.settled && x.device(0)->generation == 2;
              }),
                          peer_access::enabled),
              want);
  second.reset();
  must(answer_of(system.open(1).reset()));
  EXPECT_EQ(with_access(of_first.until([](const p2p_graph& x) {
              return x.settled && x.device(1)->generation == 2;
            }),
                        peer_access::enabled),
            want);
  EXPECT_TRUE(is_ok(answer_of(first.verify_links())));
}

TEST(Topology, LeavesTheDevicesToOthers) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system;
  auto t = open_topology(system, quick_config(true));
  auto world = system.open_world();
  auto verified = t.verify_links();
  auto measured = t.measure_links();
  for (std::uint64_t i = 0; i < 10; ++i)
    EXPECT_TRUE(works(world, i));
  EXPECT_TRUE(is_ok(answer_of(verified)));
  EXPECT_TRUE(is_ok(answer_of(measured)));
}

} // namespace
} // namespace troupe::testing
