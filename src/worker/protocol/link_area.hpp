/// Memory that a parent and one worker share for the hot path: commands of the device's lane, their
/// replies, and the completion of events.
#pragma once

#include "worker/protocol/command_ring.hpp"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace troupe::detail {

struct link_area {
  static constexpr std::size_t command_bytes = std::size_t{512} << 10;
  static constexpr std::size_t reply_bytes = std::size_t{16} << 10;
  /// Sufficient: a lane uses a few events per operation in flight.
  static constexpr std::size_t event_count = std::size_t{1} << 14;

  command_ring_words words;
  alignas(64) std::atomic<std::uint64_t> replied{0}; ///< number of the latest answered command
  std::atomic<std::uint32_t> reply_size{0};
  bell to_asker;
  /// Number of asynchronous errors of communicator ranks. It grows before the work in the stream of
  /// such a rank is marked as done.
  std::atomic<std::uint64_t> communicator_errors{0};
  alignas(64) std::array<std::byte, reply_bytes> reply{};
  /// For each event, the number of its latest completed record. The numbers of records count up.
  alignas(64) std::array<std::atomic<std::uint64_t>, event_count> done{};
  alignas(64) std::array<std::byte, command_bytes> commands{};
};

} // namespace troupe::detail
