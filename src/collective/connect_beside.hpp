/// Connects a communicator without its lanes.
#pragma once

#include <troupe/backend.hpp>
#include <troupe/error.hpp>

#include <chrono>
#include <memory>

namespace troupe::detail {

class communicator;
class runtime;

/// Connects a communicator whose ranks are all in this process, each on a thread and in a stream of
/// its own, while its lanes do other work. Blocks until it is connected, or has ended. After an
/// error it is called off, and no thread is in a call on it any more.
/// @param id under which it was built
/// @thread a builder; never a lane
/// @errors errc::unavailable: not connected within `limit`; errc::lane_stuck: a call did not
///         return, which ends all work of the process; why the communicator ended; those of the
///         backend
caf::error connect_beside(runtime& owner, const std::shared_ptr<communicator>& target,
                          const communicator_id& id, std::chrono::nanoseconds limit);

} // namespace troupe::detail
