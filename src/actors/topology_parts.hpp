/// A topology in its parts: the data, which requests use, and the actor, which supervises it.
#pragma once

#include "actors/system.hpp"
#include "topology/topology_core.hpp"
#include <troupe/p2p_topology.hpp>
#include <troupe/topology.hpp>

#include <caf/actor.hpp>

#include <memory>

namespace troupe::detail {

struct topology_parts {
  std::shared_ptr<system_lease> lease;
  std::shared_ptr<topology_core> core;
  caf::actor actor;
};

struct topology_access {
  static const std::shared_ptr<topology_core>& core_of(const topology& x);
};

caf::expected<topology_parts> make_topology(caf::actor_system& sys, topology_config config);

} // namespace troupe::detail
