/// Topologies in tests.
#pragma once

#include "support/world_fixture.hpp"

#include <set>
#include <utility>
#include <vector>

namespace troupe::testing {

/// Ordered pairs of devices.
using pairs = std::set<std::pair<int, int>>;

/// Returns limits for short tests of links, for tests of the notifications and not of the links.
inline topology_limits quick() {
  topology_limits result;
  result.deadline = patience;
  result.open_deadline = patience;
  result.pattern_bytes = 10'001;
  result.measured_bytes = 100'000;
  return result;
}

inline topology_config quick_config(bool verify = false) {
  return {.verify = verify, .limits = quick()};
}

inline topology open_topology(test_system& system, topology_config config = quick_config()) {
  if (config.devices.empty())
    config.devices = system.ordinals();
  return must(topology::open(system, std::move(config)));
}

inline pairs with_access(const p2p_graph& graph, peer_access access) {
  pairs result;
  for (auto& x : graph.links)
    if (x.access == access)
      result.emplace(x.from, x.to);
  return result;
}

inline pairs all_pairs(const std::vector<int>& devices) {
  pairs result;
  for (auto from : devices)
    for (auto to : devices)
      if (from != to)
        result.emplace(from, to);
  return result;
}

inline pairs without(pairs all, const pairs& some) {
  for (auto& x : some)
    all.erase(x);
  return all;
}

/// Returns links of a host backend in which the first device of a pair cannot access the second.
inline std::vector<host_link> links_without(const pairs& no_access) {
  std::vector<host_link> result;
  for (auto [from, to] : no_access)
    result.push_back({.from = from, .to = to, .access = false});
  return result;
}

} // namespace troupe::testing
