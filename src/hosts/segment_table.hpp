/// Host memory that both ends of a channel have, each its own: what one end has written goes to the
/// other as content.
#pragma once

#include "hosts/frame_link.hpp"
#include "hosts/messages.hpp"
#include "worker/shared_memory.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>

namespace troupe::detail {

/// One end's memory, by the numbers of the segments. @thread any
class segment_table {
public:
  std::shared_ptr<const shared_memory> add(std::uint64_t number, shared_memory memory);
  void remove(std::uint64_t number);
  /// Null: there is none.
  std::shared_ptr<const shared_memory> find(std::uint64_t number) const;
  /// Writes the body of a frame of content into its segment, if there is such a one. False: it
  /// makes no sense.
  bool take_content(std::span<const std::byte> body) const;

private:
  mutable std::mutex mutex_;
  std::map<std::uint64_t, std::shared_ptr<const shared_memory>> all_;
};

/// Empty: it is not in the segment.
std::span<std::byte> part_of(const shared_memory& segment, const shared_place& x,
                             std::size_t size_bytes) noexcept;

/// In pieces; nothing if it is not in the segment.
/// @errors the connection is over
caf::error send_content(frame_link& to, std::uint64_t channel, const shared_memory& segment,
                        shared_place from, std::size_t size_bytes);

/// The words that others wait for only go up.
inline void raise_to(std::atomic<std::uint64_t>& word, std::uint64_t value) noexcept {
  for (auto now = word.load(std::memory_order_relaxed);
       now < value && !word.compare_exchange_weak(now, value, std::memory_order_release);)
    ;
}

} // namespace troupe::detail
