/// Host memory with a copy at each end of a channel. Bytes that one end has written are sent to the
/// other as content.
#pragma once

#include "net/frame_link.hpp"
#include "remote/messages.hpp"
#include "worker/protocol/shared_memory.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>

namespace troupe::detail {

/// One end's memory, by segment number. @thread any
class segment_table {
public:
  std::shared_ptr<const shared_memory> add(std::uint64_t number, shared_memory memory);
  void remove(std::uint64_t number);
  /// Returns null if there is no such segment.
  std::shared_ptr<const shared_memory> find(std::uint64_t number) const;
  /// Writes the body of a content frame into its segment, if the segment exists. Returns false if
  /// the frame is not valid.
  bool take_content(std::span<const std::byte> body) const;

private:
  mutable std::mutex mutex_;
  std::map<std::uint64_t, std::shared_ptr<const shared_memory>> all_;
};

/// Returns the bytes; empty if they are not in the segment.
std::span<std::byte> part_of(const shared_memory& segment, const shared_place& x,
                             std::size_t size_bytes) noexcept;

/// Sends the bytes in pieces; sends nothing if they are not in the segment.
/// @errors the connection is over
caf::error send_content(frame_link& to, std::uint64_t channel, const shared_memory& segment,
                        shared_place from, std::size_t size_bytes);

/// Raises a word that other threads or processes wait for. Such a word never falls.
inline void raise_to(std::atomic<std::uint64_t>& word, std::uint64_t value) noexcept {
  for (auto now = word.load(std::memory_order_relaxed);
       now < value && !word.compare_exchange_weak(now, value, std::memory_order_release);)
    ;
}

} // namespace troupe::detail
