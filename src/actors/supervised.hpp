/// Worlds and topologies in their parts: the data, which requests use, and the actor, which
/// supervises it.
#pragma once

#include "actors/system.hpp"
#include "topology/topology_core.hpp"
#include "world/world_core.hpp"
#include <troupe/nccl_world.hpp>
#include <troupe/p2p_topology.hpp>
#include <troupe/topology.hpp>
#include <troupe/world.hpp>

#include <caf/actor.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace troupe::detail {

template <class Core> struct supervised {
  std::shared_ptr<system_lease> lease;
  std::shared_ptr<Core> core;
  caf::actor actor;
};

using world_parts = supervised<world_core>;
using topology_parts = supervised<topology_core>;

/// Access to the parts of a `world`. Those of an empty one are null.
struct world_access {
  static const world_parts& parts_of(const world& x) noexcept;
  static const std::shared_ptr<world_core>& core_of(const world& x) { return parts_of(x).core; }
  static const std::shared_ptr<system_lease>& lease_of(const world& x) { return parts_of(x).lease; }
  static world make(world_parts parts);
};

struct topology_access {
  static const std::shared_ptr<topology_core>& core_of(const topology& x);
};

/// Returns the error for requests to an empty `world`.
caf::error why_empty_world();
pending<collective_done> refused_by_empty_world(const char* verb);

caf::expected<world_parts> make_world(caf::actor_system& sys, world_config config);
caf::expected<topology_parts> make_topology(caf::actor_system& sys, topology_config config);

/// One group of a split.
struct world_group {
  std::int32_t color = 0;
  std::string name;
  std::vector<std::int32_t> ranks; ///< ranks of the split world, in the order of the group
  world_parts parts;
};

/// Makes the groups that `what` defines over `core`'s ranks, by color. Each is a world that builds.
/// @errors as the message `split`: no group was made
caf::expected<std::vector<world_group>> split_world(caf::actor_system& sys, const world_core& core,
                                                    const split& what, const world_limits& limits);

} // namespace troupe::detail
