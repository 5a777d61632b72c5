/// The topology: its messages, its configuration, and how to spawn it.
#pragma once

#include <troupe/collective.hpp>
#include <troupe/detail/type_ids.hpp>
#include <troupe/device.hpp>
#include <troupe/nccl_world.hpp>
#include <troupe/p2p_graph.hpp>

#include <caf/actor.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace troupe {

// -- messages. Each comment names the reply; on failure the reply is an error. `subscribe`: the
//    sender gets `p2p_graph`, now and at every change. `shutdown` ends the topology; access between
//    devices stays enabled. `copy` copies between any two buffers on its devices, as `copy_batch`

/// Requests the graph. Reply: `p2p_graph`.
struct get_graph {};

/// Checks every link between the devices. Tries again to enable access where that failed, copies
/// patterns to the other device and back, and compares them. A link that fails or corrupts data is
/// disabled (`link_check::wrong`, access `failed`, reason `errc::link_failed`). A disabled link
/// that now passes is enabled again. Requests of one topology run one at a time. Reply:
/// `p2p_graph`, when all links are checked; a disabled link is not an error of the request.
/// @errors errc::invalid_argument: a device is not in the topology; errc::unavailable: a device has
///         ended; errc::out_of_memory: no room for the patterns; errc::device_reset,
///         device_fault, worker_lost; errc::deadline_exceeded. The graph keeps the results so far
struct verify_links {
  std::vector<std::int32_t> devices = {}; ///< ordinals; empty: all
  request_options options = {};
};

/// Measures every link between the devices that has access, one link after the other. Other work on
/// the devices lowers the results. Reply: `p2p_graph`.
/// @errors as `verify_links`, and errc::link_failed: a link failed and is disabled
struct measure_links {
  std::vector<std::int32_t> devices = {}; ///< ordinals; empty: all
  request_options options = {};
};

/// One copy of a batch.
/// @shape the same number of elements of the same type, not overlapping
struct copy_pair {
  any_gpu_ref target = {};
  any_gpu_ref source = {};

  friend bool operator==(const copy_pair&, const copy_pair&) = default;
};

/// Copies between buffers on any devices of the topology: over a link if access is enabled, else
/// through pinned host memory. While access is pending, the request waits for it, up to its
/// deadline. Reply: an empty message, when all copies are done. If one copy fails, the request
/// fails, and all its targets may be indeterminate.
/// @shape  no target overlaps another target or a source
/// @errors errc::shape_mismatch: a target and its source differ in number or type of elements;
///         errc::invalid_argument: overlap, a device that is not in the topology, or a handle of
///         another actor system; errc::stale_ref; errc::indeterminate, skipped: a source;
///         errc::buffer_acquired: a user's stream or another process holds a buffer;
///         errc::overloaded: the queue of a device is full; errc::out_of_memory: of pinned memory
///         or of a device; errc::deadline_exceeded; errc::device_reset, device_fault, worker_lost:
///         of either end, during the request; errc::link_failed: a link failed and is disabled, so
///         later copies go through the host; errc::unavailable: a device or the topology has ended
struct copy_batch {
  std::vector<copy_pair> copies = {};
  request_options options = {};
};

/// Copies the whole source into each target, over all links at once. Reply: an empty message.
/// @shape  each target: as many elements as the source
/// @errors as `copy_batch`
struct replicate {
  any_gpu_ref source = {};
  std::vector<any_gpu_ref> targets = {};
  request_options options = {};
};

/// Splits the source into parts, in the order of the targets, and copies each part into its target,
/// over all links at once. Reply: an empty message.
/// @shape  all targets together: as many elements as the source
/// @errors as `copy_batch`
struct distribute {
  any_gpu_ref source = {};
  std::vector<any_gpu_ref> targets = {};
  request_options options = {};
};

/// Requests the statistics. Reply: `topology_stats`.
struct get_stats {};

/// The copies of a topology so far; each copy of a batch counts.
/// @units bytes, where a name says so
struct topology_stats {
  std::uint64_t local_copies = 0; ///< within a device
  std::uint64_t local_bytes = 0;
  std::uint64_t direct_copies = 0; ///< over a link
  std::uint64_t direct_bytes = 0;
  std::uint64_t staged_copies = 0; ///< through pinned host memory
  std::uint64_t staged_bytes = 0;
  std::uint64_t links_failed = 0; ///< disabled after a failed copy or check

  friend bool operator==(const topology_stats&, const topology_stats&) = default;
};

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, copy_pair& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::copy_pair", field("target", x.target),
                        field("source", x.source));
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, copy_batch& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::copy_batch", field("copies", x.copies),
                        field("options", x.options));
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, replicate& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::replicate", field("source", x.source),
                        field("targets", x.targets), field("options", x.options));
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, distribute& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::distribute", field("source", x.source),
                        field("targets", x.targets), field("options", x.options));
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, get_stats& x) {
  return detail::fields(f, x, "troupe::get_stats");
}

template <class Inspector>
detail::inspect_result<Inspector> inspect(Inspector& f, topology_stats& x) {
  using detail::field;
  return detail::fields(
      f, x, "troupe::topology_stats", field("local_copies", x.local_copies),
      field("local_bytes", x.local_bytes), field("direct_copies", x.direct_copies),
      field("direct_bytes", x.direct_bytes), field("staged_copies", x.staged_copies),
      field("staged_bytes", x.staged_bytes), field("links_failed", x.links_failed));
}

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, get_graph& x) {
  return detail::fields(f, x, "troupe::get_graph");
}

template <class Inspector>
detail::inspect_result<Inspector> inspect(Inspector& f, verify_links& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::verify_links", field("devices", x.devices),
                        field("options", x.options));
}

template <class Inspector>
detail::inspect_result<Inspector> inspect(Inspector& f, measure_links& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::measure_links", field("devices", x.devices),
                        field("options", x.options));
}

// -- configuration

struct topology_limits {
  /// Default deadline of a request; also of the check of new links (`topology_config::verify`).
  std::chrono::nanoseconds deadline = std::chrono::seconds{30};
  /// Deadline of `topology::open`.
  std::chrono::nanoseconds open_deadline = std::chrono::seconds{60};
  /// Size of a pattern. A check needs as much memory on each of two devices.
  std::size_t pattern_bytes = std::size_t{1} << 20;
  /// Size of a copy whose bandwidth is measured. It needs twice as much on each of two devices.
  std::size_t measured_bytes = std::size_t{64} << 20;
};

struct topology_config {
  std::vector<int> devices = {}; ///< ordinals; empty: all
  std::string name = "topology";
  /// True: no link is used before it has passed the check of `verify_links`. Until then its access
  /// stays `pending`, also after a reset. A link that cannot be checked is disabled.
  bool verify = false;
  /// False: no link is used, as if the hardware had none. Copies between devices go through the
  /// host.
  bool use_links = true;
  topology_limits limits = {};
};

/// Spawns a topology. It enables access between its devices, in both directions, wherever the
/// hardware can, for plain memory and for their pools. It does so again in each new incarnation of
/// a device. Opens devices that are not open. A device that fails or is shut down leaves the graph.
/// Any number of topologies can share devices. The actor lives until `shutdown` or an exit message,
/// even without handles, and ~actor_system waits for it: the caller ends it. (A `topology` ends
/// with its last copy.)
/// @errors errc::invalid_argument: unknown devices, a device that is listed twice, limits out of
///         range, or a system without a `troupe::config`; errc::unavailable, not_supported: the
///         backend is not available
caf::expected<caf::actor> spawn_p2p_topology(caf::actor_system& sys, topology_config config = {});

} // namespace troupe
