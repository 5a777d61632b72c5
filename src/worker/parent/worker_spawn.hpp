/// The start of a worker's process.
#pragma once

#include "foundation/file_descriptor.hpp"
#include <troupe/error.hpp>

#include <sys/types.h>

namespace troupe::detail {

struct worker_options;

/// A process that was started. It is the caller's child, to be reaped.
struct spawned_worker {
  pid_t id = -1;
  file_descriptor pidfd;
};

/// Starts the process of a worker, which gets `socket` and the standard streams, and no other
/// descriptor. After an error nothing of it is left. The kernel kills the process when the calling
/// thread ends, also if it is stopped (see `worker_parent`).
/// @errors errc::unavailable: the system refuses it
caf::expected<spawned_worker> spawn_worker(const worker_options& options, int socket);

} // namespace troupe::detail
