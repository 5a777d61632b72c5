/// NVLinks between GPUs, as NVML sees them.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace troupe::detail {

/// The PCI address of a device.
struct pci_address {
  unsigned domain = 0;
  unsigned bus = 0;
  unsigned device = 0;

  /// "0000:1b:00.0", or with a longer domain.
  static std::optional<pci_address> parse(std::string_view text) noexcept;
  friend bool operator==(const pci_address&, const pci_address&) = default;
};

/// The other end of an active NVLink.
struct nvlink_end {
  bool is_switch = false;
  pci_address gpu; ///< unless it is a switch
};

/// Returns the number of NVLinks from one GPU to another: direct links, or, without these, links to
/// switches, which connect all GPUs. Of the two GPUs' numbers the smaller one counts.
int count_nvlinks(std::span<const nvlink_end> from, const pci_address& from_address,
                  std::span<const nvlink_end> to, const pci_address& to_address) noexcept;

/// Same for the GPUs at two PCI addresses, by NVML. The first call loads NVML and may take long.
/// Returns none if NVML is missing or cannot tell.
/// @thread any
std::optional<int> nvlinks_between(const std::string& from, const std::string& to);

} // namespace troupe::detail
