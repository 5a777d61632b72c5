/// Creation of the library's own actors.
#pragma once

#include "device/device_core.hpp"
#include "runtime/runtime.hpp"
#include <troupe/config.hpp>

#include <caf/actor.hpp>
#include <caf/actor_system.hpp>

#include <memory>

namespace troupe::detail {

/// Registers the library's messages with CAF.
void register_types(config& cfg);

/// Spawns the root of the device actors.
caf::actor spawn_devices(caf::actor_system& sys, std::shared_ptr<runtime> owner);

caf::actor spawn_device_actor(caf::actor_system& sys, device_core core);

} // namespace troupe::detail
