/// Access from library code to the parts of a `world`.
#pragma once

#include "actors/supervised.hpp"
#include "world/world_core.hpp"
#include <troupe/world.hpp>

#include <memory>

namespace troupe::detail {

struct world_access {
  static const std::shared_ptr<world_core>& core_of(const world& x);
  static const std::shared_ptr<system_lease>& lease_of(const world& x);
  static world make(world_parts parts);
};

} // namespace troupe::detail
