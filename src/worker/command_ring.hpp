/// Commands from one thread of a process to one thread of another one, through shared memory.
#pragma once

#include "worker/futex.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace troupe::detail {

/// What stands before each command in the ring.
struct command_head {
  std::uint32_t size = 0; ///< of the body, in bytes
  std::uint16_t kind = 0;
  std::uint16_t wants_reply = 0;
  std::uint64_t number = 0;
};

/// The words that both sides look at; each side's own stand on lines of their own.
struct command_ring_words {
  alignas(64) std::atomic<std::uint64_t> written{0}; ///< bytes, without end
  alignas(64) std::atomic<std::uint64_t> read{0};    ///< the same
  alignas(64) bell to_reader;
  alignas(64) bell to_writer;
};

/// One side of a ring: its words and its bytes lie in memory that both processes share, the bytes
/// 16-byte aligned, their number a power of two.
class command_ring {
public:
  command_ring(command_ring_words& words, std::span<std::byte> bytes) noexcept
      : words_(words), bytes_(bytes) {}

  /// The largest body that ever has room.
  std::size_t limit() const noexcept { return bytes_.size() / 2 - 2 * sizeof(command_head); }

  // -- the writer

  /// Writes a command of two pieces; false if there is no room now. `ring` follows.
  /// @shape head.size = first.size() + second.size() <= limit()
  bool try_write(const command_head& head, std::span<const std::byte> first,
                 std::span<const std::byte> second) noexcept {
    const auto need = room_for(head.size);
    auto written = words_.written.load(std::memory_order_relaxed);
    const auto at = written & (bytes_.size() - 1);
    const auto skipped = at + need > bytes_.size() ? bytes_.size() - at : 0;
    if (written + skipped + need - words_.read.load(std::memory_order_acquire) > bytes_.size())
      return false;
    if (skipped != 0) {
      const command_head skip{static_cast<std::uint32_t>(skipped - sizeof(command_head)), 0, 0, 0};
      std::memcpy(bytes_.data() + at, &skip, sizeof skip);
      written += skipped;
    }
    auto* to = bytes_.data() + (written & (bytes_.size() - 1));
    std::memcpy(to, &head, sizeof head);
    to += sizeof head;
    if (!first.empty())
      std::memcpy(to, first.data(), first.size());
    if (!second.empty())
      std::memcpy(to + first.size(), second.data(), second.size());
    words_.written.store(written + need, std::memory_order_release);
    return true;
  }
  void ring() noexcept { words_.to_reader.ring_sleepers(); }
  /// Sleeps until there may be room, or `limit` is over.
  void wait_for_room(std::chrono::nanoseconds limit) noexcept {
    const auto read = words_.read.load(std::memory_order_acquire);
    words_.to_writer.sleep(limit,
                           [&] { return words_.read.load(std::memory_order_acquire) != read; });
  }

  // -- the reader

  bool empty() const noexcept {
    return words_.written.load(std::memory_order_acquire) ==
           words_.read.load(std::memory_order_relaxed);
  }
  /// The oldest command, which stays until `pop`; false if there is none.
  bool peek(command_head& head, std::span<const std::byte>& body) noexcept {
    for (;;) {
      if (empty())
        return false;
      const auto read = words_.read.load(std::memory_order_relaxed);
      const auto* at = bytes_.data() + (read & (bytes_.size() - 1));
      std::memcpy(&head, at, sizeof head);
      body = {at + sizeof head, head.size};
      if (head.kind != 0)
        return true;
      words_.read.store(read + sizeof head + head.size, std::memory_order_release);
    }
  }
  /// `head`: what `peek` gave.
  void pop(const command_head& head) noexcept {
    words_.read.store(words_.read.load(std::memory_order_relaxed) + room_for(head.size),
                      std::memory_order_release);
    words_.to_writer.ring_sleepers();
  }
  /// Sleeps until something was written or somebody rang (`wake_reader`), or `limit` is over;
  /// unless `ready()`.
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

  command_ring_words& words_;
  std::span<std::byte> bytes_;
};

} // namespace troupe::detail
