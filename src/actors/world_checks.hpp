/// The checks of a world's configuration.
#pragma once

#include <troupe/backend.hpp>
#include <troupe/error.hpp>
#include <troupe/world_status.hpp>

#include <memory>
#include <vector>

namespace troupe::detail {

class lane;

/// @errors errc::invalid_argument, not_supported
caf::error check_limits(const world_limits& x, const std::vector<std::shared_ptr<lane>>& lanes,
                        bool with_program);

/// Returns the policy for these lanes: `automatic` becomes `nccl` where `direct` is not possible,
/// and `direct` for devices in workers.
/// @errors errc::invalid_argument; errc::not_supported: `direct` is not possible
caf::expected<collectives_policy> policy_for(collectives_policy wanted, const backend& by,
                                             const std::vector<std::shared_ptr<lane>>& lanes);

/// Returns the limits, cut to the longest time that a clock can count.
world_limits countable(world_limits x);

} // namespace troupe::detail
