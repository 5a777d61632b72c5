/// Commands from one thread of a process to one thread of another one, through shared memory.
#pragma once

#include "worker/protocol/futex.hpp"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace troupe::detail {

/// Header of each command in the ring.
struct command_head {
  std::uint32_t size = 0; ///< of the body, in bytes
  std::uint16_t kind = 0;
  std::uint16_t wants_reply = 0;
  std::uint64_t number = 0;
};

/// The counters that both sides access. Each side's own are on their own cache lines.
struct command_ring_words {
  alignas(64) std::atomic<std::uint64_t> written{0}; ///< total bytes, not modulo the ring's size
  alignas(64) std::atomic<std::uint64_t> read{0};    ///< the same
  alignas(64) bell to_reader;
  alignas(64) bell to_writer;
};

/// One side of a ring, from the start of the ring on.
/// Its counters and its bytes are in memory that both processes share. The bytes are 16-byte
/// aligned and their number is a power of two. Each side uses its own counter, and checks the other
/// side's for plausibility.
class command_ring {
public:
  command_ring(command_ring_words& words, std::span<std::byte> bytes) noexcept
      : words_(words), bytes_(bytes) {}

  /// Returns the largest body size that can ever fit.
  std::size_t limit() const noexcept { return bytes_.size() / 2 - 2 * sizeof(command_head); }
  /// Returns true if the other side has written an impossible value: the ring is unusable.
  bool broken() const noexcept { return broken_; }

  // -- the writer

  /// Writes a command of two pieces. Returns false if there is no room now or the ring is broken.
  /// To be followed by `ring`.
  /// @shape head.size = first.size() + second.size() <= limit()
  bool try_write(const command_head& head, std::span<const std::byte> first,
                 std::span<const std::byte> second) noexcept {
    const auto need = room_for(head.size);
    const auto at = own_ & (bytes_.size() - 1);
    const auto skipped = at + need > bytes_.size() ? bytes_.size() - at : 0;
    if (own_ + skipped + need - others_ > bytes_.size()) { // as far as this side knows
      look_at(words_.read, others_, own_);
      if (broken_ || own_ + skipped + need - others_ > bytes_.size())
        return false;
    }
    if (skipped != 0) {
      const command_head skip{static_cast<std::uint32_t>(skipped - sizeof(command_head)), 0, 0, 0};
      std::memcpy(bytes_.data() + at, &skip, sizeof skip);
      own_ += skipped;
    }
    auto* to = bytes_.data() + (own_ & (bytes_.size() - 1));
    std::memcpy(to, &head, sizeof head);
    to += sizeof head;
    if (!first.empty())
      std::memcpy(to, first.data(), first.size());
    if (!second.empty())
      std::memcpy(to + first.size(), second.data(), second.size());
    own_ += need;
    words_.written.store(own_, std::memory_order_release);
    return true;
  }
  void ring() noexcept { words_.to_reader.ring_sleepers(); }
  /// Sleeps until there may be more room than at the failed write, or `limit` is over.
  void wait_for_room(std::chrono::nanoseconds limit) noexcept {
    words_.to_writer.sleep(limit,
                           [&] { return words_.read.load(std::memory_order_acquire) != others_; });
  }

  // -- the reader

  bool empty() const noexcept { return words_.written.load(std::memory_order_acquire) == own_; }
  /// Reads the oldest command, which stays until `pop`. Returns false if there is none or the ring
  /// is broken. The other side can still change the body.
  bool peek(command_head& head, std::span<const std::byte>& body) noexcept {
    while (!broken_) {
      look_at(words_.written, others_, own_ + bytes_.size());
      const auto there = others_ - own_;
      if (broken_ || there == 0)
        return false;
      const auto place = own_ & (bytes_.size() - 1);
      const auto in_a_row = bytes_.size() - place;
      if (there % sizeof(command_head) != 0 || there < sizeof head)
        break;
      std::memcpy(&head, bytes_.data() + place, sizeof head);
      const auto size = room_for(head.size);
      if (size > there || size > in_a_row || (head.kind != 0 && head.size > limit()))
        break;
      if (head.kind != 0) {
        body = bytes_.subspan(place + sizeof head, head.size);
        return true;
      }
      advance(size);
    }
    broken_ = true;
    return false;
  }
  /// Removes the command `head` that `peek` gave.
  void pop(const command_head& head) noexcept {
    advance(room_for(head.size));
    words_.to_writer.ring_sleepers();
  }
  /// Sleeps until there is a command, `wake_reader` is called or `limit` is over. Returns at once
  /// if `ready()` holds.
  template <class F> void wait_for_command(std::chrono::nanoseconds limit, F ready) noexcept {
    words_.to_reader.sleep(limit, [&] { return !empty() || ready(); });
  }
  void wake_reader() noexcept { words_.to_reader.ring(); }

private:
  static constexpr std::size_t room_for(std::size_t size) noexcept {
    constexpr std::size_t unit = sizeof(command_head);
    return unit + (size + unit - 1) / unit * unit;
  }
  static_assert(sizeof(command_head) == 16);

  void advance(std::size_t size) noexcept {
    own_ += size;
    words_.read.store(own_, std::memory_order_release);
  }
  /// Reads the other side's counter, which may only grow, to at most `most`.
  void look_at(const std::atomic<std::uint64_t>& word, std::uint64_t& known,
               std::uint64_t most) noexcept {
    const auto now = word.load(std::memory_order_acquire);
    if (now - known > most - known)
      broken_ = true;
    else
      known = now;
  }

  command_ring_words& words_;
  std::span<std::byte> bytes_;
  std::uint64_t own_ = 0;    ///< written or read by this side
  std::uint64_t others_ = 0; ///< last known counter of the other side
  bool broken_ = false;
};

/// Memory that a parent and one worker share for the hot path: commands of the device's lane, their
/// replies, and the completion of events.
struct link_area {
  static constexpr std::size_t command_bytes = std::size_t{512} << 10;
  static constexpr std::size_t reply_bytes = std::size_t{16} << 10;
  /// Sufficient: a lane uses a few events per operation in flight.
  static constexpr std::size_t event_count = std::size_t{1} << 14;
  /// Claims of programs for writing that have a word each. Further claims have none.
  static constexpr std::size_t word_count = 256;

  command_ring_words words;
  alignas(64) std::atomic<std::uint64_t> replied{0}; ///< number of the latest answered command
  std::atomic<std::uint32_t> reply_size{0};
  bell to_asker;
  /// Number of asynchronous errors of communicator ranks. It grows before the work in the stream of
  /// such a rank is marked as done.
  std::atomic<std::uint64_t> communicator_errors{0};
  /// As `library_states::workspace_changes`. It grows before the reply to the command.
  std::atomic<std::uint64_t> workspace_changes{0};
  alignas(64) std::array<std::byte, reply_bytes> reply{};
  /// For each event, the number of its latest completed record. The numbers of records count up.
  alignas(64) std::array<std::atomic<std::uint64_t>, event_count> done{};
  /// Counts of what the worker's programs are writing, for each claim (`backend::take_word`).
  alignas(64) std::array<std::atomic<std::uint64_t>, word_count> unfinished{};
  alignas(64) std::array<std::byte, command_bytes> commands{};
};

} // namespace troupe::detail
