/// Worlds over groups of a world's ranks.
#pragma once

#include "actors/supervised.hpp"
#include <troupe/nccl_world.hpp>
#include <troupe/world_status.hpp>

#include <caf/actor_system.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace troupe::detail {

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
