/// The graph of a topology: which devices reach which, over which links, and how fast.
#pragma once

#include <troupe/device_status.hpp>
#include <troupe/error.hpp>
#include <troupe/link_kind.hpp>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace troupe {

/// Whether one device may use the memory of another one.
enum class peer_access : std::uint8_t {
  pending, ///< not known yet, or one of the devices is between two incarnations
  none,    ///< the hardware cannot do it
  enabled,
  failed, ///< it went wrong; see `p2p_link::reason`
};

std::string_view to_string(peer_access x) noexcept;
TROUPE_INSPECT_ENUM(peer_access)

/// Whether data that is copied over a link arrives unchanged.
enum class link_check : std::uint8_t { unchecked, right, wrong };

std::string_view to_string(link_check x) noexcept;
TROUPE_INSPECT_ENUM(link_check)

/// A device of a topology.
struct p2p_device {
  std::int32_t device = -1; ///< ordinal
  device_phase phase = device_phase::opening;
  std::uint64_t generation = 0;
  std::int32_t island = -1;

  friend bool operator==(const p2p_device&, const p2p_device&) = default;
};

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, p2p_device& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::p2p_device", field("device", x.device),
                        field("phase", x.phase), field("generation", x.generation),
                        field("island", x.island));
}

/// The access of device `from` to the memory of device `to`, with reads and writes of its own;
/// between workers, with reads alone.
struct p2p_link {
  std::int32_t from = -1;
  std::int32_t to = -1;
  link_kind kind = link_kind::host;
  std::int32_t links = 0;            ///< number of NVLinks; 0: none, or unknown
  std::int32_t performance_rank = 0; ///< as in CUDA: lower is faster; 0 is the fastest
  bool native_atomics = false;
  bool possible = false; ///< the hardware can do it
  peer_access access = peer_access::pending;
  link_check checked = link_check::unchecked; ///< by the last check, or copy that failed
  caf::error reason = {};                     ///< why access is `failed`; none otherwise
  /// Of copies from `from` to `to`, with an idle other direction: writes, or reads by `to` between
  /// workers; 0: not measured. @units GB/s, of 1e9 bytes
  double bandwidth = 0;
  /// Of both directions together, at the same time. @units as above
  double bandwidth_both = 0;
  /// Of a copy of 8 bytes, from its issue until its device's lane finds it done; 0: not measured.
  /// @units us
  double latency_us = 0;
};

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, p2p_link& x) {
  using detail::field;
  return detail::fields(
      f, x, "troupe::p2p_link", field("from", x.from), field("to", x.to), field("kind", x.kind),
      field("links", x.links), field("performance_rank", x.performance_rank),
      field("native_atomics", x.native_atomics), field("possible", x.possible),
      field("access", x.access), field("checked", x.checked), field("reason", x.reason),
      field("bandwidth", x.bandwidth), field("bandwidth_both", x.bandwidth_both),
      field("latency_us", x.latency_us));
}

/// A topology at one moment. Subscribers get the present graph first, then each change.
struct p2p_graph {
  std::string name = {};
  std::uint64_t version = 0; ///< grows with every change
  /// No device is still opening, all links are known, and none is pending.
  bool settled = false;
  /// The living devices, by ordinal. A device that failed or was shut down is not in the list.
  std::vector<p2p_device> devices = {};
  /// One for each ordered pair of `devices`, sorted by `from`, then by `to`.
  std::vector<p2p_link> links = {};

  /// Returns null if there is none, as does `device`.
  const p2p_link* link(int from, int to) const noexcept;
  const p2p_device* device(int ordinal) const noexcept;

  /// Returns the groups of devices that reach each other, directly or over others. On every hop
  /// each device has access to the other one's memory, or will have it again when both are ready.
  /// Devices are sorted by ordinal, islands by their first devices; `p2p_device::island` counts in
  /// this order.
  std::vector<std::vector<std::int32_t>> islands() const;
};

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, p2p_graph& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::p2p_graph", field("name", x.name),
                        field("version", x.version), field("settled", x.settled),
                        field("devices", x.devices), field("links", x.links));
}

} // namespace troupe
