/// Copies between devices in worker processes: the target's worker reads the source's memory.

#include "support/eventually.hpp"
#include "support/topology_fixture.hpp"
#include "support/worker_losses.hpp"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

using elements = std::vector<std::uint32_t>;

constexpr std::size_t count = std::size_t{1} << 18;

/// For EXPECT_TRUE: a copy from `from` to `to` brings every byte.
::testing::AssertionResult copies(const topology& t, const device& from, const device& to,
                                  std::uint32_t value) {
  auto source = must(from.allocate<std::uint32_t>(count));
  auto target = must(to.allocate<std::uint32_t>(count));
  must(answer_of(from.fill(source, value)));
  must(answer_of(to.fill(target, value + 1)));
  if (auto done = answer_of(t.copy(target, source)); !done)
    return ::testing::AssertionFailure() << describe(done.error());
  return holds(to, target, elements(count, value));
}

TEST(PeerCopiesInWorkers, GoOverTheLinkInBothDirections) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system{in_worker_processes(2)};
  const auto t = open_topology(system, quick_config(true));
  EXPECT_TRUE(eventually([&] { return t.graph().settled; }));
  EXPECT_EQ(with_access(t.graph(), peer_access::enabled), all_pairs({0, 1}));
  for (auto [from, to] : {std::pair{0, 1}, {1, 0}})
    EXPECT_TRUE(copies(t, system.open(from), system.open(to), 17));
  EXPECT_EQ(t.stats().direct_copies, 2u);
  EXPECT_EQ(t.stats().staged_copies, 0u);
}

TEST(PeerCopiesInWorkers, AreMeasured) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system{in_worker_processes(2)};
  const auto t = open_topology(system);
  const auto graph = must(answer_of(t.measure_links()));
  ASSERT_EQ(graph.links.size(), 2u);
  for (auto& x : graph.links) {
    EXPECT_GT(x.bandwidth, 0);
    EXPECT_GT(x.bandwidth_both, 0);
    EXPECT_GT(x.latency_us, 0);
  }
}

class LossBesideCopies : public ::testing::TestWithParam<int> {};

/// Each copy is answered, right or with the loss. Then copies go over the link again.
TEST_P(LossBesideCopies, HarmsNoOther) {
  TROUPE_NEEDS_DEVICES(3);
  const int lost = GetParam();
  test_system system{in_worker_processes(3)};
  const auto t = open_topology(system, quick_config(true));
  EXPECT_TRUE(eventually([&] { return t.graph().settled; }));
  const auto victim = system.open(lost);
  for (std::uint32_t round = 1; round <= 3; ++round) {
    const other_memory kept{system.open(2)};
    std::vector<std::pair<gpu_ref<std::uint32_t>, pending<void>>> all;
    auto source = must(system.open(0).allocate<std::uint32_t>(count));
    must(answer_of(system.open(0).fill(source, round)));
    for (const int to : {1, 2})
      for (int i = 0; i < 20; ++i) {
        auto target = must(system.open(to).allocate<std::uint32_t>(count));
        all.emplace_back(target, t.copy(target, source));
      }
    EXPECT_EQ(code_of(kill_worker(victim)), errc::worker_lost);
    for (auto& [target, done] : all) {
      const auto how = answer_of(done);
      if (how) {
        EXPECT_TRUE(target.device() == lost ||
                    holds(system.open(target.device()), target, elements(count, round)));
      } else {
        EXPECT_TRUE(lost == 0 || target.device() == lost) << describe(how.error());
        EXPECT_TRUE(has_code(how.error(), errc::worker_lost));
      }
    }
    EXPECT_TRUE(kept.is_there());
    EXPECT_TRUE(eventually([&] { return works(system.open(lost)) == true; }));
    EXPECT_TRUE(eventually([&] { return t.graph().settled; }));
    for (auto [from, to] : {std::pair{0, 1}, {1, 0}, {0, 2}, {2, 1}})
      EXPECT_TRUE(copies(t, system.open(from), system.open(to), 100 + round));
  }
  EXPECT_EQ(t.stats().links_failed, 0u);
}

INSTANTIATE_TEST_SUITE_P(Of, LossBesideCopies, ::testing::Values(0, 1),
                         [](const auto& x) { return x.param == 0 ? "TheSource" : "ATarget"; });

} // namespace

} // namespace troupe::testing
