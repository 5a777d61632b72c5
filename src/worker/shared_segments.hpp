/// Host memory that a parent shares with its workers: pinned memory, and the words that say which
/// events are done.
#pragma once

#include "worker/protocol.hpp"
#include "worker/shared_memory.hpp"

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace troupe::detail {

class worker_link;

/// @thread any
class shared_segments {
public:
  /// Zeroed memory, whole pages.
  /// @errors errc::out_of_memory; errc::unavailable: no more files can be opened
  caf::expected<std::byte*> create(std::size_t size_bytes);
  /// Memory that is shared already, which stays mapped here as long as `keep`.
  void add(std::span<std::byte> bytes, int descriptor, std::shared_ptr<const void> keep);
  /// Workers that have mapped it unmap it.
  /// @errors errc::invalid_argument: there is none that begins at `memory`
  caf::error remove(const void* memory);

  /// The place of `size_bytes` bytes, which `in` has mapped then.
  /// @errors errc::invalid_argument: they are not shared, or not any more; what mapping gives
  caf::expected<shared_place> place_of(const void* memory, std::size_t size_bytes, worker_link& in);

private:
  struct segment {
    std::uint64_t number = 0;
    std::span<std::byte> bytes;
    int descriptor = -1;
    std::shared_ptr<const void> keep;
    std::vector<std::weak_ptr<worker_link>> mapped_by;
  };

  std::mutex mutex_;
  std::uint64_t last_ = 0;
  std::map<const std::byte*, segment> all_; ///< by their begin
};

} // namespace troupe::detail
