/// What a world tells of itself, and the bounds that it keeps.
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

/// Where a world is in its life.
enum class world_phase : std::uint8_t {
  building, ///< its communicator is being made; requests wait, up to their deadlines
  ready,
  failed, ///< for the reason given; requests are refused
  shut_down,
};

std::string_view to_string(world_phase x) noexcept;
TROUPE_INSPECT_ENUM(world_phase)

/// One rank of a world.
struct world_member {
  std::int32_t rank = -1;
  std::int32_t device = -1; ///< ordinal
  std::uint64_t generation = 0;

  friend bool operator==(const world_member&, const world_member&) = default;
};

template <class Inspector>
detail::inspect_result<Inspector> inspect(Inspector& f, world_member& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::world_member", field("rank", x.rank),
                        field("device", x.device), field("generation", x.generation));
}

/// A world at one moment; sent to subscribers at every change, the present one first.
struct world_status {
  std::string name = {};
  world_phase phase = world_phase::building;
  std::uint64_t epoch = 0; ///< grows with each communicator
  /// Grows with each change of the members; where a program drives the ranks, with each
  /// communicator.
  std::uint64_t membership = 0;
  /// By rank; without those that a world has lost and goes on without (`loss_policy::shrink`).
  std::vector<world_member> members = {};
  /// Why it is not ready; none while it is, but in an epoch that a standby began: there, until its
  /// own standby is ready, why the one before ended; and while it is without some of its ranks.
  caf::error reason = {};
  bool standby_ready = false; ///< a communicator waits to take over (`standby_policy`)
  /// Symmetric allocations (`allocation_options`) that the communicator has registered.
  std::uint64_t windows = 0;
  /// Why it uses all of them as plain memory; none if nothing is wrong.
  caf::error windows_reason = {};
};

template <class Inspector>
detail::inspect_result<Inspector> inspect(Inspector& f, world_status& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::world_status", field("name", x.name),
                        field("phase", x.phase), field("epoch", x.epoch),
                        field("membership", x.membership), field("members", x.members),
                        field("reason", x.reason), field("standby_ready", x.standby_ready),
                        field("windows", x.windows), field("windows_reason", x.windows_reason));
}

/// The view that a `membership_changed` error carries.
std::optional<world_status> status_of(const caf::error& e);

/// The communicators that a world keeps connected and idle, to go on with at once when the present
/// one ends.
enum class standby_policy : std::uint8_t {
  none, ///< requests wait until another one is built and connected
  /// One over the same members. It costs as much device memory on each rank as any communicator, on
  /// NVIDIA GPUs about 485 MiB (less with a smaller NCCL_BUFFSIZE). Whenever one is connected,
  /// after the start and after each switch, its devices do nothing else for that time.
  same,
  /// For each rank, one of all others: when a device is lost with its worker process, the world
  /// goes on without it at once. Each costs as much device memory on each of its ranks as any
  /// communicator. Only with `loss_policy::shrink`.
  survivors,
  /// For each rank, one with the spare of its device in its place: when a device is lost with its
  /// worker process, the spare has it at once, in its next generation, and the world goes on. Each
  /// costs as much device memory on each rank as any communicator, and a spare that of a process
  /// beside. Only with `loss_policy::failover`, and for devices in worker processes
  /// (troupe/worker.hpp).
  full,
};

std::string_view to_string(standby_policy x) noexcept;

/// What a world does when it loses a device with its worker process.
enum class loss_policy : std::uint8_t {
  /// `failover` with `standby_policy::full`, `shrink` with `survivors`, else `rebuild`.
  automatic,
  /// The device's spare has it at once: each device has one (`backend::provide_spare`). With
  /// `standby_policy::full` the world goes on at once, too; else requests wait for a communicator.
  failover,
  /// The others go on: at once with `standby_policy::survivors`, else as soon as they have a
  /// communicator. Requests say that they may (`request_options::allow_shrunk`). When the device is
  /// there again, a communicator of all ranks is built beside the other one, and takes over. Ranks
  /// keep their numbers. At most 64 ranks. Without any it waits for those that have not failed.
  shrink,
  rebuild, ///< requests wait until the device is there again, up to their deadlines
  fail,    ///< the world is `world_phase::failed`
};

std::string_view to_string(loss_policy x) noexcept;

/// The bounds that a world keeps. They are taken as they are: a time of 0, or a negative one, is
/// over at once. With such a `deadline` every request that names none has
/// `errc::deadline_exceeded`; with such a `quiet_limit` a lane that is inside a call when its
/// communicator ends is taken for stuck. But a `stall_limit` or `connect_limit` of 0 or less is
/// none: nothing that stands still ends by itself.
struct world_limits {
  /// Of a request that names none. It answers the request, and nothing more.
  std::chrono::nanoseconds deadline = std::chrono::seconds{30};
  /// For a communicator to be built and connected.
  std::chrono::nanoseconds build_deadline = std::chrono::seconds{60};
  /// A collective that is not done so long after its first rank started ends the communicator.
  /// While it waits behind another world's, that one's limit counts instead.
  std::chrono::nanoseconds stall_limit = std::chrono::seconds{30};
  /// For its connections to be made, once its devices have come to it: they do nothing else
  /// meanwhile. Past it a rank that is in NCCL does not come back (`quiet_limit`).
  std::chrono::nanoseconds connect_limit = std::chrono::seconds{10};
  /// For every lane to leave a communicator that ended; a lane that does not is stuck for good.
  std::chrono::milliseconds quiet_limit{100};
  /// Requests that may wait for a communicator, calls of a rank that may wait for other ranks', and
  /// messages for a rank's program. Callers of more requests wait for room (`room_policy`), or are
  /// answered with `errc::overloaded`; for those that must not block the bound is 16 times this.
  /// More messages are `errc::overloaded`. 0: none may wait.
  std::size_t waiting_limit = 4096;
  /// Communicators that may be built in place of ones that ended, within `restart_window`; 0 or
  /// less: the world fails with its first one.
  int restarts = 10;
  std::chrono::nanoseconds restart_window = std::chrono::seconds{60};
  /// Before the second restart within the window; doubles with each further one.
  std::chrono::milliseconds restart_backoff{50};
  /// What is ready for the end of a communicator; also in the worlds that `split` makes of this
  /// one. A switch counts as a restart. A standby that cannot be had is tried again after
  /// `restart_backoff`, which doubles, at most ten times and to `restart_window`, and does not
  /// count.
  standby_policy standby = standby_policy::none;
  /// When a device is lost; also in the worlds that `split` makes of this one. A communicator that
  /// is built because of it counts as a restart.
  loss_policy on_loss = loss_policy::automatic;
  /// Collectives of at most so many bytes use symmetric memory as such (`allocation_options`); what
  /// counts is the larger one of a rank's buffers. Up to here all kinds of them are faster on
  /// NVIDIA H200s, and from twice as much on not all; 0: none does.
  std::size_t symmetric_bytes = std::size_t{32} << 10;
};

} // namespace troupe
