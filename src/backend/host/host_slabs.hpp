/// Slabs of virtual devices: shared memory at addresses that the caller chooses.
#pragma once

#include "foundation/file_descriptor.hpp"
#include <troupe/backend.hpp>

#include <cstddef>
#include <map>
#include <mutex>

namespace troupe::detail {

/// @thread any
class host_slabs {
public:
  host_slabs() = default;
  /// Unmaps all.
  ~host_slabs();
  host_slabs(const host_slabs&) = delete;
  host_slabs& operator=(const host_slabs&) = delete;

  static std::size_t granularity() noexcept;
  /// Implements `backend::make_slab`. `limit`: bytes that the slabs of the device may have in all.
  caf::expected<file_descriptor> make(const memory_slab& what, std::size_t limit);
  /// Implements `backend::map_slab`.
  caf::error map(const memory_slab& what, int descriptor);
  /// Implements `backend::unmap_slab`.
  caf::error unmap(const memory_slab& what);
  /// Returns how many bytes the slabs of a device have that are mapped.
  std::size_t bytes_on(int ordinal) const;

private:
  static caf::error check(const memory_slab& what);
  caf::error map_file(const memory_slab& what, int descriptor);

  mutable std::mutex mutex_;
  std::map<void*, memory_slab> mapped_; ///< by address
};

} // namespace troupe::detail
