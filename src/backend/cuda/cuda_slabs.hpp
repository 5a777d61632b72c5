/// Slabs of GPUs: memory that the driver can share by a file descriptor (cuMemCreate).
#pragma once

#include "foundation/file_descriptor.hpp"
#include <troupe/backend.hpp>

#include <cstddef>

namespace troupe::detail {

/// Implements `backend::slab_granularity` for devices 0 to `devices` - 1.
std::size_t slab_granularity(int devices) noexcept;

/// Implements `backend::make_slab`.
caf::expected<file_descriptor> make_slab(const memory_slab& what) noexcept;

/// Implements `backend::map_slab`.
caf::error map_slab(const memory_slab& what, int descriptor, int by) noexcept;

/// Implements `backend::unmap_slab`.
caf::error unmap_slab(const memory_slab& what) noexcept;

} // namespace troupe::detail
