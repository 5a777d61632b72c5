/// From the library's insides to the facade of a world.
#pragma once

#include "core/world_core.hpp"
#include <troupe/world.hpp>

#include <memory>

namespace troupe::detail {

struct world_access {
  static const std::shared_ptr<world_core>& core_of(const world& x);
};

} // namespace troupe::detail
