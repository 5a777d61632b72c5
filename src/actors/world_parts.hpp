/// A world in its parts: the data, which requests use, and the actor, which supervises it.
#pragma once

#include "actors/system.hpp"
#include "world/world_core.hpp"
#include <troupe/nccl_world.hpp>

#include <caf/actor.hpp>

#include <memory>
#include <vector>

namespace troupe::detail {

struct world_parts {
  std::shared_ptr<system_lease> lease;
  std::shared_ptr<world_core> core;
  caf::actor actor;
};

caf::expected<world_parts> make_world(caf::actor_system& sys, world_config config);

} // namespace troupe::detail
