/// The kind of connection between two devices.
#pragma once

#include <troupe/detail/caf_compat.hpp>

#include <cstdint>
#include <string_view>

namespace troupe {

enum class link_kind : std::uint8_t {
  host,   ///< no direct connection: data goes through host memory
  pcie,   ///< direct, over PCIe
  nvlink, ///< NVLink, direct or through a switch
  memory, ///< virtual devices: both use host memory
};

/// Returns the enumerator's name, which is never freed.
std::string_view to_string(link_kind x) noexcept;
TROUPE_INSPECT_ENUM(link_kind)

} // namespace troupe
