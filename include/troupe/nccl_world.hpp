/// The supervisor of a world: its messages, its configuration, and how to spawn it.
#pragma once

#include <troupe/collective.hpp>
#include <troupe/detail/type_ids.hpp>
#include <troupe/device.hpp>
#include <troupe/world_status.hpp>

#include <caf/actor.hpp>

#include <string>
#include <vector>

namespace troupe {

/// What a world is made of.
struct world_config {
  /// Ordinals, in rank order.
  std::vector<int> devices;
  std::string name = "world";
  world_limits limits;
};

/// Answered by `world_status`.
struct get_status {};

/// The sender gets `world_status`, now and at every change.
struct subscribe {};

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, get_status& x) {
  return detail::fields(f, x, "troupe::get_status");
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, subscribe& x) {
  return detail::fields(f, x, "troupe::subscribe");
}

/// Spawns a world that begins to build. It answers the requests of troupe/collective.hpp,
/// `get_status`, `subscribe`, `record_flight` and `shutdown` (which ends it, as an exit message
/// does), and keeps its devices up as long as it lives.
/// @errors errc::invalid_argument: no device, one that does not exist, or one twice; the system's
///         configuration is no `troupe::config`. errc::unavailable, not_supported: the backend is
///         not there
caf::expected<caf::actor> spawn_nccl_world(caf::actor_system& sys, world_config config);

/// The same, over devices that the application has; rank i is the i-th. `config.devices` does not
/// matter.
/// @errors errc::invalid_argument, too: the devices are of different actor systems
caf::expected<caf::actor> spawn_nccl_world(const std::vector<device>& devices,
                                           world_config config = {});

} // namespace troupe
