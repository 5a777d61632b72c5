/// Host memory that a parent shares with its workers: pinned memory, and the words that tell which
/// events are done.
#pragma once

#include "worker/parent/worker_mapping.hpp"
#include "worker/protocol/protocol.hpp"

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace troupe::detail {

/// A worker maps a segment when it first needs it, in some milliseconds if the driver is ending a
/// process. So a spare maps what its worker has mapped, in advance.
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

  /// Maps in `spare` what `worker` has mapped, and does the same with what that maps later, and
  /// with the words of `spare` where those of `worker` are mapped, but does not wait for these.
  /// If a worker fails to map a segment in advance, `place_of` tries again.
  /// @errors errors of mapping
  caf::error prepare(worker_link& worker, worker_link& spare);

private:
  struct segment {
    std::uint64_t number = 0;
    std::span<std::byte> bytes;
    int descriptor = -1;
    std::shared_ptr<const void> keep;
    std::vector<std::shared_ptr<worker_mapping>> mappings;

    /// Returns null if it is not mapped there, nor about to be.
    std::shared_ptr<worker_mapping> mapping_in(const worker_link& in) const;
  };
  struct worker_and_spare {
    std::weak_ptr<worker_link> worker;
    std::weak_ptr<worker_link> spare;
  };
  /// To be sent without the lock.
  struct map_request {
    map_args what;
    int descriptor = -1;
    std::shared_ptr<const void> keep; ///< of the descriptor
    std::shared_ptr<worker_mapping> mapping;

    void send() const;
  };
  using map_requests = std::vector<map_request>;

  // These need the lock.
  segment* find(const void* memory, std::size_t size_bytes);
  segment* words_of(const worker_link& x);
  /// Maps a segment in a worker that has not mapped it, and where spares will need it.
  std::shared_ptr<worker_mapping> map(segment& x, worker_link& in, map_requests& requests);
  void map_once(segment& x, worker_link& in, map_requests& requests) {
    if (!x.mapping_in(in))
      map(x, in, requests);
  }

  /// Sends those to `first` at once.
  static void send(map_requests all, const worker_link& first);

  std::mutex mutex_;
  std::uint64_t last_ = 0;
  std::map<const std::byte*, segment> all_; ///< by start address
  std::vector<worker_and_spare> spares_;
};

} // namespace troupe::detail
