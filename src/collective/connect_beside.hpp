/// Connects a communicator without its lanes.
#pragma once

#include <troupe/backend.hpp>
#include <troupe/error.hpp>

#include <chrono>
#include <memory>

namespace troupe::detail {

class communicator;

/// Connects a communicator whose ranks are all in this process, each on a thread and in a stream of
/// its own, while its lanes do other work. Blocks.
/// @param id under which it was built; called off after an error
/// @thread a builder; never a lane
/// @errors errc::unavailable: no threads, or not connected within `limit`; those of the backend
caf::error connect_beside(backend& on, const std::shared_ptr<communicator>& target,
                          const communicator_id& id, std::chrono::nanoseconds limit);

} // namespace troupe::detail
