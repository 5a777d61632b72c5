/// The state and the statistics of a device.
#pragma once

#include <troupe/error.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace troupe {

/// The phase of a device.
enum class device_phase : std::uint8_t {
  opening, ///< not ready yet; requests wait
  ready,
  resetting, ///< its memory or its process is gone; requests wait until it is ready again
  failed,    ///< it could not be opened, or CUDA is unusable in this process
  shut_down, ///< on request
};

std::string_view to_string(device_phase x) noexcept;
TROUPE_INSPECT_ENUM(device_phase)

/// A change of a device's state, sent to its watchers.
/// @invariant generations and incarnations grow; a watcher sees each change once, in order
struct device_changed {
  std::int32_t device = -1;
  device_phase phase = device_phase::opening;
  std::uint64_t generation = 0;  ///< of its memory
  caf::error reason = {};        ///< the cause, if the device failed or the change was requested
  std::uint64_t incarnation = 0; ///< as `device::incarnation`
};

template <class Inspector>
detail::inspect_result<Inspector> inspect(Inspector& f, device_changed& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::device_changed", field("device", x.device),
                        field("phase", x.phase), field("generation", x.generation),
                        field("reason", x.reason), field("incarnation", x.incarnation));
}

/// The state of a device at the time of the request.
struct device_stats {
  std::int32_t device = -1;
  device_phase phase = device_phase::opening;
  std::uint64_t generation = 0;
  std::string name = {};
  std::string pci_id = {};           ///< empty on the host backend
  std::int32_t capability_major = 0; ///< compute capability; 0 on the host backend
  std::int32_t capability_minor = 0;
  std::uint64_t free_bytes = 0;
  std::uint64_t total_bytes = 0;
  std::uint64_t in_flight = 0; ///< operations that were issued and are not over
  std::uint64_t queued = 0;    ///< operations that wait to be issued
  /// The process in which the device is driven, if it is a worker of this host; else 0.
  std::int64_t worker_pid = 0;
  std::uint64_t incarnation = 0; ///< as `device::incarnation`
};

template <class Inspector>
detail::inspect_result<Inspector> inspect(Inspector& f, device_stats& x) {
  using detail::field;
  return detail::fields(
      f, x, "troupe::device_stats", field("device", x.device), field("phase", x.phase),
      field("generation", x.generation), field("name", x.name), field("pci_id", x.pci_id),
      field("capability_major", x.capability_major), field("capability_minor", x.capability_minor),
      field("free_bytes", x.free_bytes), field("total_bytes", x.total_bytes),
      field("in_flight", x.in_flight), field("queued", x.queued), field("worker_pid", x.worker_pid),
      field("incarnation", x.incarnation));
}

} // namespace troupe
