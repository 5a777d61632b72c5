/// How the library's own actors are made.
#pragma once

#include "core/device_core.hpp"
#include "core/runtime.hpp"
#include <troupe/config.hpp>

#include <caf/actor.hpp>
#include <caf/actor_system.hpp>

#include <memory>

namespace troupe::detail {

/// Makes the library's messages known to CAF.
void register_types(config& cfg);

/// The root of the device and collective actors.
caf::actor spawn_devices(caf::actor_system& sys, std::shared_ptr<runtime> owner);

caf::actor spawn_device_actor(caf::actor_system& sys, device_core core);

caf::actor spawn_collective_actor(caf::actor_system& sys, std::shared_ptr<device_state> device);

} // namespace troupe::detail
