/// What a topology tells: which devices reach which, over what, and how fast.
#pragma once

#include <troupe/device_status.hpp>
#include <troupe/error.hpp>
#include <troupe/link_kind.hpp>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace troupe {

/// May one device use the memory of another one?
enum class peer_access : std::uint8_t {
  pending, ///< not known yet, or one of them is between two lives
  none,    ///< the hardware cannot
  enabled,
  failed, ///< it went wrong: `p2p_link::reason`
};

std::string_view to_string(peer_access x) noexcept;
TROUPE_INSPECT_ENUM(peer_access)

/// Does what is copied over a link arrive as it was?
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

/// What device `from` has of the memory of `to`, which it reads and writes itself.
struct p2p_link {
  std::int32_t from = -1;
  std::int32_t to = -1;
  link_kind kind = link_kind::host;
  std::int32_t links = 0;            ///< number of NVLinks; 0: none, or nobody can tell
  std::int32_t performance_rank = 0; ///< CUDA's: the lower the faster; 0 is the fastest
  bool native_atomics = false;
  bool possible = false; ///< the hardware can
  peer_access access = peer_access::pending;
  link_check checked = link_check::unchecked; ///< by the last test, or copy that failed
  caf::error reason = {};                     ///< why access is `failed`; none otherwise
  /// Of writing, with nothing in the other direction; 0: not measured. @units GB/s, of 1e9 bytes
  double bandwidth = 0;
  /// Of both directions together, while each device writes to the other. @units as above
  double bandwidth_both = 0;
  /// Of a copy of 8 bytes, from its issue until its device's lane sees that it is done; 0: not
  /// measured. @units us
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

/// A topology at one moment; sent to subscribers at every change, the present one first.
struct p2p_graph {
  std::string name = {};
  std::uint64_t version = 0; ///< grows with every change
  /// All devices have come up, all links are known, and none is pending.
  bool settled = false;
  /// Those that live, by ordinal: one that failed or was shut down is not there any more.
  std::vector<p2p_device> devices = {};
  /// One for each ordered pair of `devices`, by `from`, then by `to`.
  std::vector<p2p_link> links = {};

  /// Null if there is none.
  const p2p_link* link(int from, int to) const noexcept;
  const p2p_device* device(int ordinal) const noexcept;

  /// Devices that reach each other, directly or over others: on every hop both have access to the
  /// other one's memory, or will have it again once both are ready. Each by ordinal; the islands by
  /// their first devices, which is also the order of `p2p_device::island`.
  std::vector<std::vector<std::int32_t>> islands() const;
};

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, p2p_graph& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::p2p_graph", field("name", x.name),
                        field("version", x.version), field("settled", x.settled),
                        field("devices", x.devices), field("links", x.links));
}

} // namespace troupe
