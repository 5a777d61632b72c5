/// Worlds over groups of a world's ranks.
#pragma once

#include "actors/world_parts.hpp"
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
  std::vector<std::int32_t> ranks; ///< in the world that is split, in the order of the group
  world_parts parts;
};

/// The groups that `what` makes of `core`'s ranks, by color; each is a world that builds.
/// @errors as the message `split`: none was made
caf::expected<std::vector<world_group>> split_world(caf::actor_system& sys, const world_core& core,
                                                    const split& what, const world_limits& limits);

} // namespace troupe::detail
