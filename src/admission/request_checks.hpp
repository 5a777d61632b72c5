/// Checks that a request passes before it gets its position: its deadline, its lanes and its uses.
#pragma once

#include "operation/operation.hpp"
#include "operation/room.hpp"

#include <span>

namespace troupe::detail {

/// @errors the error of a request that comes after its deadline
inline caf::error check_deadline(const operation& op, clock::time_point now) {
  return op.deadline > now ? caf::error{} : op.late();
}

/// Checks that the devices of all parts are usable and, if `bounded`, that their queues have room.
/// @errors errc::unavailable, errc::overloaded
caf::error check_lanes(locked lock, const operation& op, bool bounded, queue_bound bound);

/// Checks `uses` of `request`, which is `op` or becomes a part of it.
/// @errors errc::stale_ref, errc::buffer_acquired, and why a range cannot be read
caf::error check_uses(locked lock, const operation& request, const operation& op,
                      std::span<const use> uses);

} // namespace troupe::detail
