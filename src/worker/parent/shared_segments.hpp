/// Host memory that a parent shares with its workers: pinned memory, and the words that tell which
/// events are done.
#pragma once

#include "worker/parent/worker_set.hpp"
#include "worker/protocol/protocol.hpp"

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>

namespace troupe::detail {

/// @thread any
class shared_segments {
public:
  /// Creates zeroed memory of whole pages.
  /// @errors errc::out_of_memory; errc::unavailable: no more files can be opened
  caf::expected<std::byte*> create(std::size_t size_bytes);
  /// Adds memory that is shared already. It stays mapped here as long as `keep` exists.
  void add(std::span<std::byte> bytes, int descriptor, std::shared_ptr<const void> keep);
  /// Removes a segment. Workers that have mapped it unmap it.
  /// @errors errc::invalid_argument: no segment begins at `memory`
  caf::error remove(const void* memory);

  /// Returns the place of `size_bytes` bytes; `in` maps the segment first if needed.
  /// @errors errc::invalid_argument: the bytes are not, or no longer shared; errors of mapping
  caf::expected<shared_place> place_of(const void* memory, std::size_t size_bytes, worker_link& in);

private:
  struct segment {
    std::uint64_t number = 0;
    std::span<std::byte> bytes;
    int descriptor = -1;
    std::shared_ptr<const void> keep;
    worker_set mapped_by;
  };

  std::mutex mutex_;
  std::uint64_t last_ = 0;
  std::map<const std::byte*, segment> all_; ///< by start address
};

} // namespace troupe::detail
