/// The supervisor of a world: its messages, its configuration, and how to spawn it.
#pragma once

#include <troupe/collective.hpp>
#include <troupe/detail/type_ids.hpp>
#include <troupe/device.hpp>
#include <troupe/world_status.hpp>

#include <caf/actor.hpp>

#include <cstdint>
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

/// Worlds over groups of a world's ranks, as MPI_Comm_split makes them: the ranks of one color are
/// a world, ordered by their keys, and by their ranks here where keys are equal. Answered by
/// `world_split` at once; all of them begin to build at the same time.
///
/// Each is a world of its own with the limits of this one; it shares its devices, their lanes and
/// their memory with all other worlds on them, and is independent of the world that it comes from:
/// it goes on when that one ends, and is built anew, as every world, when one of its own devices is
/// reset; what happens to other devices does not concern it. Communicators of its own make it so,
/// and cost device memory on each rank. It ends with `shutdown` or an exit message.
/// @shape  colors: one per rank, negative: in no group; keys: one per rank, or empty: all equal
/// @errors errc::invalid_argument: wrong numbers, or no name; errc::membership_changed;
///         errc::unavailable: the world, or one of its devices, has ended. Nothing is kept
struct split {
  std::string name; ///< that of color c is "name/c"
  std::vector<std::int32_t> colors;
  std::vector<std::int32_t> keys;
  request_options options; ///< the deadline does not matter
};

/// One group.
struct sub_world {
  std::int32_t color = 0;
  std::string name;
  std::vector<std::int32_t> ranks; ///< ranks[i]: what its rank i is in the world that was split
  caf::actor actor;
};

/// The groups, by color.
struct world_split {
  std::vector<sub_world> groups;
};

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, split& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::split", field("name", x.name), field("colors", x.colors),
                        field("keys", x.keys), field("options", x.options));
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, sub_world& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::sub_world", field("color", x.color), field("name", x.name),
                        field("ranks", x.ranks), field("actor", x.actor));
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, world_split& x) {
  return detail::fields(f, x, "troupe::world_split", detail::field("groups", x.groups));
}

/// Spawns a world that begins to build. It answers the requests of troupe/collective.hpp,
/// `split`, `get_status`, `subscribe`, `record_flight` and `shutdown` (which ends it, as an exit
/// message does), and keeps its devices up as long as it lives.
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
