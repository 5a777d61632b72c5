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

// -- messages; each is answered by what its comment names, or by an error. `subscribe`: the sender
//    gets `p2p_graph`, now and at every change. `shutdown` ends the topology; access between
//    devices stays enabled. `copy` goes between any two buffers on its devices, as `copy_batch`

/// Answered by `p2p_graph`.
struct get_graph {};

/// Enables access again where that failed, and copies patterns over every link between the devices,
/// to and from the other end. A link that brings something else, or fails, is taken out
/// (`link_check::wrong`, access `failed`, reason `errc::link_failed`), one that was out comes back
/// if it is right now. Requests of one topology take turns. Answered by `p2p_graph`, once all are
/// tested: a link that is taken out is no error of the request.
/// @errors errc::invalid_argument: a device is not in the topology; errc::unavailable: one has
///         ended; errc::out_of_memory: no room for the patterns; errc::device_reset,
///         device_fault, worker_lost; errc::deadline_exceeded. What was found out so far stays in
///         the graph
struct verify_links {
  std::vector<std::int32_t> devices = {}; ///< ordinals; empty: all
  request_options options = {};
};

/// Measures every link between the devices to which there is access, one after the other. What else
/// the devices do meanwhile takes its share. Answered by `p2p_graph`.
/// @errors as `verify_links`, and errc::link_failed: a link failed, and is taken out
struct measure_links {
  std::vector<std::int32_t> devices = {}; ///< ordinals; empty: all
  request_options options = {};
};

/// One copy of several.
/// @shape the same number of elements of the same type, not overlapping
struct copy_pair {
  any_gpu_ref target = {};
  any_gpu_ref source = {};

  friend bool operator==(const copy_pair&, const copy_pair&) = default;
};

/// Copies between buffers on any devices of the topology: over a link, if there is access to it, or
/// else through pinned host memory. Where access is pending, the request waits for it, up to its
/// deadline. Answered by an empty message, once all are done; if one fails, so does the request,
/// and all of its targets may be indeterminate.
/// @shape  no target overlaps another one, or a source
/// @errors errc::shape_mismatch: a target and its source differ in number or type of elements;
///         errc::invalid_argument: overlap, a device that is not in the topology, or a handle of
///         another actor system; errc::stale_ref; errc::indeterminate, skipped: a source;
///         errc::buffer_acquired: a user's stream or another process holds one; errc::overloaded:
///         too much waits for a device; errc::out_of_memory: of pinned memory, or the device has
///         none left; errc::deadline_exceeded; errc::device_reset, device_fault, worker_lost: of
///         either end, meanwhile; errc::link_failed: a link failed, and is taken out: the next
///         copies go through the host; errc::unavailable: a device, or the topology, has ended
struct copy_batch {
  std::vector<copy_pair> copies = {};
  request_options options = {};
};

/// The whole source into each target, over all links at once. Answered by an empty message.
/// @shape  each target: as many elements as the source
/// @errors as `copy_batch`
struct replicate {
  any_gpu_ref source = {};
  std::vector<any_gpu_ref> targets = {};
  request_options options = {};
};

/// The source in parts, in the order of the targets, over all links at once. Answered by an empty
/// message.
/// @shape  all targets together: as many elements as the source
/// @errors as `copy_batch`
struct distribute {
  any_gpu_ref source = {};
  std::vector<any_gpu_ref> targets = {};
  request_options options = {};
};

/// Answered by `topology_stats`.
struct get_stats {};

/// What a topology has copied so far; a batch counts each of its copies.
/// @units bytes, where a name says so
struct topology_stats {
  std::uint64_t local_copies = 0; ///< within a device
  std::uint64_t local_bytes = 0;
  std::uint64_t direct_copies = 0; ///< over a link
  std::uint64_t direct_bytes = 0;
  std::uint64_t staged_copies = 0; ///< through pinned host memory
  std::uint64_t staged_bytes = 0;
  std::uint64_t links_failed = 0; ///< taken out: a copy or a check over them went wrong

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
  /// Of a request that names none, and of the check of new links (`topology_config::verify`).
  std::chrono::nanoseconds deadline = std::chrono::seconds{30};
  /// For `topology::open`.
  std::chrono::nanoseconds open_deadline = std::chrono::seconds{60};
  /// Of a pattern. A check needs as much memory on each of two devices.
  std::size_t pattern_bytes = std::size_t{1} << 20;
  /// Of a copy whose bandwidth is measured. It needs twice as much on each of two devices.
  std::size_t measured_bytes = std::size_t{64} << 20;
};

struct topology_config {
  std::vector<int> devices = {}; ///< ordinals; empty: all
  std::string name = "topology";
  /// Trust no link before it was checked as `verify_links` does: whenever access is enabled, so
  /// also after a reset, it stays `pending` until then. A link that cannot be checked is out, too.
  bool verify = false;
  /// False: no link is used, as if the hardware had none; copies between devices go through the
  /// host.
  bool use_links = true;
  topology_limits limits = {};
};

/// Spawns a topology. It enables access between its devices wherever they can, in both directions,
/// for plain memory and for their pools, and again whenever one of them begins another life. Its
/// devices come up if they are not; one that fails or is shut down leaves the graph. Any number of
/// topologies can share devices. It lives until `shutdown` or an exit message, not until its last
/// handle is gone, and ~actor_system waits for it: who spawns it ends it. (A `topology` ends with
/// its last copy.)
/// @errors errc::invalid_argument: unknown devices, one that is listed twice, limits out of range,
///         or a system without a `troupe::config`; errc::unavailable, not_supported:
///         the backend is not there
caf::expected<caf::actor> spawn_p2p_topology(caf::actor_system& sys, topology_config config = {});

} // namespace troupe
