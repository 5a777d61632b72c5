/// NVLinks between GPUs, as NVML sees them.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace troupe::detail {

/// Where a device is on PCI.
struct pci_address {
  unsigned domain = 0;
  unsigned bus = 0;
  unsigned device = 0;

  /// "0000:1b:00.0", or with a longer domain.
  static std::optional<pci_address> parse(std::string_view text) noexcept;
  friend bool operator==(const pci_address&, const pci_address&) = default;
};

/// What an NVLink that is up leads to.
struct nvlink_end {
  bool is_switch = false;
  pci_address gpu; ///< unless it is a switch
};

/// How many NVLinks lead from one GPU to another one, directly or, as many as both have, over
/// switches, which connect all GPUs.
int count_nvlinks(std::span<const nvlink_end> from, const pci_address& from_address,
                  std::span<const nvlink_end> to, const pci_address& to_address) noexcept;

/// The same of the GPUs that PCI has there, by NVML, which is loaded at the first call; that may
/// take long. None if there is no NVML, or it cannot tell.
/// @thread any
std::optional<int> nvlinks_between(const std::string& from, const std::string& to);

} // namespace troupe::detail
