/// The supervisor of a world: its messages, its configuration, and the function that spawns it.
#pragma once

#include <troupe/collective.hpp>
#include <troupe/detail/type_ids.hpp>
#include <troupe/device.hpp>
#include <troupe/way_table.hpp>
#include <troupe/world_status.hpp>

#include <caf/actor.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace troupe {

/// Maximum size of a `program_message`, of a `program_report`, and of a program's arguments
/// together with its name, its world's name and 16 bytes per rank. Larger data goes through memory
/// (`device::offer`). @units bytes
inline constexpr std::size_t most_program_bytes = std::size_t{56} << 10;

/// A program whose actors drive the ranks of a world, each in the process that has its device
/// (troupe/worker_program.hpp).
struct world_program {
  std::string name = {};                    ///< as registered in that process; empty: no program
  std::vector<std::uint8_t> arguments = {}; ///< for each rank's actor (`most_program_bytes`)
};

/// The configuration of a world.
struct world_config {
  /// Ordinals, in rank order.
  std::vector<int> devices = {};
  std::string name = "world"; ///< for the log and records; several worlds may have the same
  world_limits limits = {};
  collectives_policy collectives =
      collectives_policy::automatic; ///< also of worlds that are split off
  /// The same. None: `way_table::built_in` for the world's number of ranks.
  std::optional<way_table> ways = {};
  /// With `automatic`: NCCL's communicator is built as soon as the world is ready, if `ways` gives
  /// anything to it.
  bool nccl_ahead = false;
  /// If set, the world refuses collectives (`errc::not_supported`): its ranks make their own calls.
  /// The world's actor takes `program_message`s, and its subscribers also get `program_report` and
  /// `program_ended`.
  world_program program = {};
};

/// Options of memory on all ranks.
struct allocation_options {
  bool zeroed = false;
};

template <class Inspector>
detail::inspect_result<Inspector> inspect(Inspector& f, allocation_options& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::allocation_options", field("zeroed", x.zeroed));
}

/// Allocates memory on every rank. Reply: `world_buffers`.
/// @errors errc::out_of_memory: nothing is kept, and the world continues; errc::membership_changed;
///         errc::unavailable; errc::not_supported: the world has a program. Without
///         `allow_shrunk`, it waits for a lost device, up to the deadline
struct allocate_all {
  std::uint64_t count = 0; ///< on each rank; @units elements
  dtype type = dtype::float32;
  allocation_options what = {};
  request_options options = {};
};

template <class Inspector>
detail::inspect_result<Inspector> inspect(Inspector& f, allocate_all& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::allocate_all", field("count", x.count),
                        field("type", x.type), field("what", x.what), field("options", x.options));
}

/// One handle per rank, in rank order; empty for absent ranks (`request_options::allow_shrunk`).
struct world_buffers {
  std::vector<any_gpu_ref> refs = {};
};

template <class Inspector>
detail::inspect_result<Inspector> inspect(Inspector& f, world_buffers& x) {
  return detail::fields(f, x, "troupe::world_buffers", detail::field("refs", x.refs));
}

/// Requests the state. Reply: `world_status`.
struct get_status {};

/// Subscribes the sender to `world_status`: it gets one now and one at every change.
struct subscribe {};

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, get_status& x) {
  return detail::fields(f, x, "troupe::get_status");
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, subscribe& x) {
  return detail::fields(f, x, "troupe::subscribe");
}

/// Makes worlds over groups of a world's ranks, as MPI_Comm_split does. The ranks of one color form
/// a world, ordered by their keys, and by their ranks here if keys are equal. Reply: `world_split`,
/// at once; all new worlds begin to build at the same time.
///
/// Each new world has the limits of this one. It shares its devices, their lanes and their memory
/// with all other worlds on them, but is independent of the world that was split. It continues when
/// that one ends. It builds a new communicator when one of its own devices is reset; other devices
/// do not affect it. For this it has its own communicators, which cost device memory on each rank.
/// It lives until `shutdown` or an exit message, even without handles; ~actor_system waits for it.
/// @shape  colors: one per rank, negative: in no group; keys: one per rank, or empty: all equal
/// @errors errc::invalid_argument: wrong number of colors or keys, or no name;
///         errc::membership_changed; errc::unavailable: the world, or a device of a group, has
///         ended; errc::not_supported: a rank is in another process. Nothing is kept
struct split {
  std::string name = {}; ///< the world of color c is named "name/c"
  std::vector<std::int32_t> colors = {};
  std::vector<std::int32_t> keys = {};
  request_options options = {}; ///< the deadline is ignored
};

/// One group of a split.
struct sub_world {
  std::int32_t color = 0;
  std::string name = {};
  std::vector<std::int32_t> ranks =
      {}; ///< ranks[i]: the rank that its rank i has in the world that was split
  caf::actor actor = {};
};

/// The groups, ordered by color.
struct world_split {
  std::vector<sub_world> groups = {};
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

/// Spawns a world, which begins to build. It takes the requests of troupe/collective.hpp, `split`,
/// `allocate_all`, `run_step`, `program_message`, `get_status`, `subscribe`, `record_flight` and
/// `shutdown`. It keeps its devices open while it lives: until `shutdown` or an exit message, even
/// without handles. ~actor_system waits for it: the caller ends it. (A `world` ends with its last
/// copy.)
/// @errors errc::invalid_argument: no device, a device that does not exist or is listed twice;
///         limits out of range, or that do not go together; a program's name or arguments that are
///         too long; the system's configuration is not a `troupe::config`. errc::not_supported: a
///         program, or `loss_policy::failover`, but devices outside worker
///         processes. errc::unavailable, not_supported: the backend is not available
caf::expected<caf::actor> spawn_nccl_world(caf::actor_system& sys, world_config config);

/// The same over devices that the application has opened: rank i has `devices[i]`. Ignores
/// `config.devices`.
/// @errors errc::invalid_argument, too: the devices are of different actor systems
caf::expected<caf::actor> spawn_nccl_world(const std::vector<device>& devices,
                                           world_config config = {});

} // namespace troupe
