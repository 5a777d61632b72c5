/// Messages between the library's own actors.
#pragma once

#include "collective/communicator_role.hpp"
#include <troupe/detail/type_ids.hpp>
#include <troupe/error.hpp>

#include <cstdint>

namespace troupe::detail {

/// To the root. The answer is the actor of that device, which is spawned if there is none.
struct get_device_actor {
  std::int32_t device = -1;
};

/// To a world: the build of its epoch is over; `why` is none on success.
struct communicator_built {
  std::uint64_t epoch = 0;
  caf::error why;
};

/// To a world: its standbys with spares are built, or `why` says why not.
struct standbys_built {
  caf::error why;
};

/// To a world: the communicator of that epoch ended.
struct communicator_ended {
  std::uint64_t epoch = 0;
  caf::error why;
  communicator_role role = communicator_role::live;
};

/// To a world: a request waits for NCCL's communicator beside the direct one.
struct beside_wanted {};

/// To a world: the build of that communicator is over; `why` is none on success.
struct beside_built {
  caf::error why;
};

/// To a world: an ended communicator has left its devices.
struct communicator_gone {};

/// To a world, from itself, later: it tries to build.
struct retry_build {
  std::uint64_t number = 0; ///< only the last one counts
};

/// To a world, from itself, later: the deadline of a build is over.
struct build_overdue {
  std::uint64_t epoch = 0; ///< of the communicator; 0: of the devices
};

/// To a world: replies with its status when it is not being built any more.
struct until_built {};

/// To a topology: its graph has changed.
struct graph_changed {};

} // namespace troupe::detail
