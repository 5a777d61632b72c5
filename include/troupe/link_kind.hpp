/// What lies between two devices.
#pragma once

#include <troupe/detail/caf_compat.hpp>

#include <cstdint>
#include <string_view>

namespace troupe {

enum class link_kind : std::uint8_t {
  host,   ///< no way of their own: what one has for the other goes through the host's memory
  pcie,   ///< directly, over PCIe
  nvlink, ///< NVLink, from one to the other or through a switch
  memory, ///< virtual devices: both lie in the host's memory
};

/// The enumerator's name; lives forever.
std::string_view to_string(link_kind x) noexcept;
TROUPE_INSPECT_ENUM(link_kind)

} // namespace troupe
