/// The topology: its messages, its configuration, and how to spawn it.
#pragma once

#include <troupe/collective.hpp>
#include <troupe/detail/type_ids.hpp>
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
//    devices stays enabled

/// Answered by `p2p_graph`.
struct get_graph {};

/// Enables access again where that failed, and copies patterns over every link between the devices,
/// to and from the other end. A link that brings something else, or fails, is taken out
/// (`link_check::wrong`, access `failed`, reason `errc::link_failed`), one that was out comes back
/// if it is right now. Requests of one topology take turns. Answered by `p2p_graph`, once all are
/// tested: a link that is taken out is no error of the request.
/// @errors errc::invalid_argument: a device that is not in the topology; errc::unavailable: one
/// that
///         has ended; errc::out_of_memory: no room for the patterns; errc::device_reset;
///         errc::deadline_exceeded. What was found out so far stays in the graph
struct verify_links {
  std::vector<std::int32_t> devices; ///< ordinals; empty: all
  request_options options;
};

/// Measures every link between the devices to which there is access, one after the other. What else
/// the devices do meanwhile takes its share. Answered by `p2p_graph`.
/// @errors as `verify_links`, and errc::link_failed: a link failed, and is taken out
struct measure_links {
  std::vector<std::int32_t> devices; ///< ordinals; empty: all
  request_options options;
};

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
  std::vector<int> devices; ///< ordinals; empty: all
  std::string name = "topology";
  /// Trust no link before it was checked as `verify_links` does: whenever access is enabled, so
  /// also after a reset, it stays `pending` until then. A link that cannot be checked is out, too.
  bool verify = false;
  topology_limits limits;
};

/// Spawns a topology. It enables access between its devices wherever they can, in both directions,
/// for plain memory and for their pools, and again whenever one of them begins another life. Its
/// devices come up if they are not; one that fails or is shut down leaves the graph. Any number of
/// topologies can share devices. It ends with `shutdown` or an exit message.
/// @errors errc::invalid_argument: unknown devices, one that stands twice, or a system without a
///         `troupe::config`; errc::unavailable
caf::expected<caf::actor> spawn_p2p_topology(caf::actor_system& sys, topology_config config = {});

} // namespace troupe
