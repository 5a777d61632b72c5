/// The supervisor of a world: its messages, its configuration, and how to spawn it.
#pragma once

#include <troupe/collective.hpp>
#include <troupe/detail/type_ids.hpp>
#include <troupe/device.hpp>
#include <troupe/world_status.hpp>

#include <caf/actor.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace troupe {

/// So many bytes a program's arguments may have, with its name, its world's and 16 for each rank, a
/// `program_message` and a `program_report`. More goes through memory (`device::offer`).
inline constexpr std::size_t most_program_bytes = std::size_t{56} << 10;

/// A program whose actors drive the ranks of a world, each in the process that has its device
/// (troupe/worker_program.hpp).
struct world_program {
  std::string name = {};                    ///< as it is registered there; empty: none
  std::vector<std::uint8_t> arguments = {}; ///< for each rank's actor (`most_program_bytes`)
};

/// What a world is made of.
struct world_config {
  /// Ordinals, in rank order.
  std::vector<int> devices = {};
  std::string name = "world"; ///< in the log and in records; several worlds may have the same
  world_limits limits = {};
  /// With it the world answers no collectives (`errc::not_supported`): its ranks make their own
  /// calls. The world's actor takes `program_message`s; its subscribers get `program_report` and
  /// `program_ended`, too.
  world_program program = {};
};

/// What memory on all ranks is to be like.
struct allocation_options {
  bool zeroed = false;
  /// For small collectives: with it, an all_reduce or reduce_scatter of sums of floats of up to 32
  /// bits, or an all_gather, of at most `world_limits::symmetric_bytes` is faster, where all of
  /// the ranks' buffers are at the same place of one such allocation, or of one for `send` and one
  /// for `recv`, or are in place; every other request takes it as the plain memory that it also is.
  ///
  /// It belongs to this world. Its communicators register it, the standby too; the first time this
  /// takes each of them about 50 ms, in which its devices do nothing else, and about 240 MiB on
  /// each rank, then 4 ms and nothing. Until then, and if it fails
  /// (`world_status::windows_reason`), it is plain memory. That of all ranks is freed with the last
  /// handle to any of it. GPUs give 2 MiB at least.
  ///
  /// Such a collective cannot be aborted. It is issued when all ranks have come to it with nothing
  /// before it that may stand still (else it goes the plain way); if it stands still all the same,
  /// the devices are lost to the process (errc::lane_stuck).
  bool symmetric = false;
};

template <class Inspector>
detail::inspect_result<Inspector> inspect(Inspector& f, allocation_options& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::allocation_options", field("zeroed", x.zeroed),
                        field("symmetric", x.symmetric));
}

/// Memory on every rank. Answered by `world_buffers`.
/// @errors errc::out_of_memory: nothing is kept, all goes on as before; errc::membership_changed;
///         errc::unavailable; errc::not_supported: the world has a program. Without
///         `allow_shrunk` plain memory waits for a device that is lost, up to the deadline;
///         symmetric memory takes all ranks: errc::membership_changed
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

/// One handle per rank, in rank order; empty for those that the world is without
/// (`request_options::allow_shrunk`).
struct world_buffers {
  std::vector<any_gpu_ref> refs = {};
};

template <class Inspector>
detail::inspect_result<Inspector> inspect(Inspector& f, world_buffers& x) {
  return detail::fields(f, x, "troupe::world_buffers", detail::field("refs", x.refs));
}

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
/// and cost device memory on each rank. Each lives until `shutdown` or an exit message, whatever
/// becomes of the handles to it, and ~actor_system waits for it.
/// @shape  colors: one per rank, negative: in no group; keys: one per rank, or empty: all equal
/// @errors errc::invalid_argument: wrong numbers, or no name; errc::membership_changed;
///         errc::unavailable: the world, or one of its devices, has ended. Nothing is kept
struct split {
  std::string name = {}; ///< that of color c is "name/c"
  std::vector<std::int32_t> colors = {};
  std::vector<std::int32_t> keys = {};
  request_options options = {}; ///< the deadline does not matter
};

/// One group.
struct sub_world {
  std::int32_t color = 0;
  std::string name = {};
  std::vector<std::int32_t> ranks =
      {}; ///< ranks[i]: what its rank i is in the world that was split
  caf::actor actor = {};
};

/// The groups, by color.
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

/// Spawns a world that begins to build. It answers the requests of troupe/collective.hpp,
/// `split`, `allocate_all`, `program_message`, `get_status`, `subscribe`, `record_flight` and
/// `shutdown`, and keeps its devices up as long as it lives: until `shutdown` or an exit message,
/// not until its last handle is gone. ~actor_system waits for it: who spawns it ends it. (A `world`
/// ends with its last copy.)
/// @errors errc::invalid_argument: no device, one that does not exist, or one twice; limits out of
///         range, or that do not go together; a program's name or arguments that
///         are too long; the system's configuration is no `troupe::config`. errc::not_supported: a
///         program, `loss_policy::failover` or `standby_policy::survivors`, and devices that are
///         not in worker processes. errc::unavailable, not_supported: the backend is not there
caf::expected<caf::actor> spawn_nccl_world(caf::actor_system& sys, world_config config);

/// The same, over devices that the application has; rank i is the i-th. `config.devices` does not
/// matter.
/// @errors errc::invalid_argument, too: the devices are of different actor systems
caf::expected<caf::actor> spawn_nccl_world(const std::vector<device>& devices,
                                           world_config config = {});

} // namespace troupe
