/// The state of a world, and its limits.
#pragma once

#include <troupe/error.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace troupe {

/// The phase of a world.
enum class world_phase : std::uint8_t {
  building, ///< its communicator is being built; requests wait, up to their deadlines
  ready,
  failed, ///< for the reason in the status; requests are refused
  shut_down,
};

std::string_view to_string(world_phase x) noexcept;
TROUPE_INSPECT_ENUM(world_phase)

/// One rank of a world.
struct world_member {
  std::int32_t rank = -1;
  std::int32_t device = -1; ///< ordinal
  std::uint64_t generation = 0;
  std::uint64_t incarnation = 0; ///< as `device::incarnation`

  friend bool operator==(const world_member&, const world_member&) = default;
};

template <class Inspector>
detail::inspect_result<Inspector> inspect(Inspector& f, world_member& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::world_member", field("rank", x.rank),
                        field("device", x.device), field("generation", x.generation),
                        field("incarnation", x.incarnation));
}

/// The state of a world at one moment. Subscribers get the present one first, then each change.
struct world_status {
  std::string name = {};
  world_phase phase = world_phase::building;
  std::uint64_t epoch = 0; ///< grows with each communicator
  /// Grows with each change of the members, except when a device is handed over to its spare
  /// (`device::hand_over`); where a program drives the ranks, with each communicator.
  std::uint64_t membership = 0;
  /// By rank; without absent ranks, which the world has lost (`loss_policy::shrink`).
  std::vector<world_member> members = {};
  /// Why the world is not ready; none while it is ready, with two exceptions. After a switch to a
  /// standby, and until the next standby is ready, it is why the previous communicator ended. While
  /// ranks are absent, it is why they are.
  caf::error reason = {};
  bool standby_ready = false; ///< a communicator is ready to take over (`standby_policy`)
};

template <class Inspector>
detail::inspect_result<Inspector> inspect(Inspector& f, world_status& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::world_status", field("name", x.name),
                        field("phase", x.phase), field("epoch", x.epoch),
                        field("membership", x.membership), field("members", x.members),
                        field("reason", x.reason), field("standby_ready", x.standby_ready));
}

/// Returns the view that a `membership_changed` error carries; none for other errors.
std::optional<world_status> status_of(const caf::error& e);

/// The things that a world keeps ready, to continue at once when its communicator ends.
/// Direct communicators cost little: a world with direct collectives always has those for its
/// `loss_policy`, and is back soon after other ends. Those of NCCL are built when needed, or kept:
/// connected and idle. Each costs as much device memory on each of its ranks as any communicator,
/// on NVIDIA GPUs about 485 MiB (less with a smaller NCCL_BUFFSIZE). While one is being connected
/// in one process, after the start and after each switch, its devices do nothing else. NCCL's
/// communicator beside a direct one has no standby.
enum class standby_policy : std::uint8_t {
  none,
  /// A spare process for each device. If a device is lost with its worker process, the spare takes
  /// over the device at once, in its next incarnation. It costs the memory of a further process.
  /// Only with `loss_policy::failover`, and for devices in worker processes (troupe/worker.hpp).
  spares,
  /// Communicators of NCCL: one over the same members or, with `loss_policy::shrink`, for each rank
  /// one of all other ranks. Not with `loss_policy::failover`.
  communicators,
  /// Both: a spare process for each device and, for each rank, a communicator with the spare of its
  /// device in the device's place.
  full,
};

std::string_view to_string(standby_policy x) noexcept;

/// How a world reacts to the loss of a device with its worker process.
enum class loss_policy : std::uint8_t {
  /// `failover` with spares (`standby_policy::spares`, `full`), else `rebuild`.
  automatic,
  /// The device's spare takes over the device at once. The world continues at once, too, if it has
  /// a communicator with the spare; otherwise requests wait for one. Only with
  /// `standby_policy::spares` or `full`.
  failover,
  /// The other ranks continue: at once if they have a communicator without the lost one, otherwise
  /// when it is built. Requests have to allow it (`request_options::allow_shrunk`). When the
  /// device is back, a communicator of all ranks is built beside the present one and takes over.
  /// Ranks keep their numbers. At most 64 ranks. If no rank is left, the world waits for the
  /// devices that have not failed.
  shrink,
  rebuild, ///< requests wait until the device is back, up to their deadlines
  fail,    ///< the world becomes `world_phase::failed`
};

std::string_view to_string(loss_policy x) noexcept;

/// Which way the collectives of a world go.
enum class collectives_policy : std::uint8_t {
  /// By NCCL. On the host backend: by its own communicators.
  nccl,
  /// By kernels of the library, which read and write the memory of other ranks' devices. At most 8
  /// ranks of this host, all in this process or all in workers without programs, whose devices
  /// reach
  /// each other. Nothing is connected, and a communicator that ends leaves its devices at once.
  direct,
  /// Direct, except what `way_table` gives to NCCL, whose communicator is built when a request
  /// needs it, or ahead (`world_config::nccl_ahead`). Requests that need it wait for it, and others
  /// do not. All by NCCL where `direct` is not possible; all direct in workers where it is.
  automatic,
};

std::string_view to_string(collectives_policy x) noexcept;

/// The limits of a world. Values out of range are refused (errc::invalid_argument): `deadline`,
/// `build_deadline` and `connect_limit` must be positive, `quiet_limit` at least 1 ms, and
/// `stall_limit`, `restart_window` and `restart_backoff` not negative.
struct world_limits {
  /// Default deadline of a request. It only completes the request: work that has begun continues.
  std::chrono::nanoseconds deadline = std::chrono::seconds{30};
  /// Time limit to build and connect a communicator.
  std::chrono::nanoseconds build_deadline = std::chrono::seconds{60};
  /// A collective that is not done this long after its first rank started ends the communicator.
  /// While it waits behind a collective of another world, only that world's limit counts. 0: no
  /// limit, so a collective that stands still does not end by itself.
  std::chrono::nanoseconds stall_limit = std::chrono::seconds{30};
  /// Time limit to make the connections, once the devices have reached them; the devices do nothing
  /// else meanwhile, except where NCCL is beside direct collectives. After it, a rank that is still
  /// inside NCCL does not return (`quiet_limit`).
  std::chrono::nanoseconds connect_limit = std::chrono::seconds{10};
  /// Time limit for every lane to leave a communicator that ended. A lane that does not is stuck.
  std::chrono::milliseconds quiet_limit{100};
  /// Maximum number of requests that wait for a communicator, of calls of one rank that wait for
  /// other ranks' calls, and of messages for a rank's program. If it is reached, callers of
  /// requests wait for room (`room_policy`) or get `errc::overloaded`; for callers that must not
  /// block, the limit is 16 times this. Further messages get `errc::overloaded`. 0: none may wait.
  std::size_t waiting_limit = 4096;
  /// Maximum number of communicators that take the place of ended ones within `restart_window`. 0
  /// or less: the world fails when its first communicator ends.
  int restarts = 10;
  std::chrono::nanoseconds restart_window = std::chrono::seconds{60};
  /// Pause before the second restart within the window; doubles with each further one. Not where a
  /// standby has taken over.
  std::chrono::milliseconds restart_backoff{50};
  /// Says what is kept ready, also in the worlds that `split` makes of this one. A switch counts as
  /// a restart. If no standby can be had, the world tries again after `restart_backoff`, which
  /// doubles, at most ten times and up to `restart_window`. These attempts do not count.
  standby_policy standby = standby_policy::none;
  /// The reaction to the loss of a device; also in the worlds that `split` makes of this one. A
  /// communicator that is built because of a loss counts as a restart.
  loss_policy on_loss = loss_policy::automatic;
};

} // namespace troupe
