/// Direct collectives: messages between ranks.
#pragma once

#include "backend/cuda/direct_channel.hpp"
#include "backend/cuda/direct_elements.hpp"
#include "backend/cuda/direct_layout.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace troupe::detail::direct {

/// Copies `bytes` bytes by all threads of the block; the ranges do not overlap.
template <class Word>
TROUPE_DEVICE void copy_words(unsigned char* to, const unsigned char* from, std::size_t bytes) {
  constexpr unsigned unrolled = 4;
  const unsigned me = gpu::thread();
  const std::size_t stride = gpu::threads();
  const std::size_t off = reinterpret_cast<std::uintptr_t>(to) % sizeof(Word);
  const std::size_t to_boundary = off == 0 ? 0 : sizeof(Word) - off;
  const std::size_t head = to_boundary < bytes ? to_boundary : bytes;
  const std::size_t words = (bytes - head) / sizeof(Word);
  const std::size_t tail = head + words * sizeof(Word);
  for (std::size_t i = me; i < head; i += stride)
    to[i] = from[i];
  for (std::size_t i = tail + me; i < bytes; i += stride)
    to[i] = from[i];
  auto* target = reinterpret_cast<Word*>(to + head);
  auto* source = reinterpret_cast<const Word*>(from + head);
  std::size_t i = me;
  for (; i + (unrolled - 1) * stride < words; i += unrolled * stride) {
    Word x[unrolled];
    TROUPE_UNROLL
    for (unsigned u = 0; u < unrolled; ++u)
      x[u] = source[i + u * stride];
    TROUPE_UNROLL
    for (unsigned u = 0; u < unrolled; ++u)
      target[i + u * stride] = x[u];
  }
  for (; i < words; i += stride)
    target[i] = source[i];
}

TROUPE_DEVICE void copy_bytes(void* to, const void* from, std::size_t bytes) {
  auto* target = static_cast<unsigned char*>(to);
  auto* source = static_cast<const unsigned char*>(from);
  const auto distance =
      reinterpret_cast<std::uintptr_t>(to) - reinterpret_cast<std::uintptr_t>(from);
  if (distance % sizeof(gpu::vector) == 0)
    copy_words<gpu::vector>(target, source, bytes);
  else if (distance % 8 == 0)
    copy_words<std::uint64_t>(target, source, bytes);
  else if (distance % 4 == 0)
    copy_words<std::uint32_t>(target, source, bytes);
  else if (distance % 2 == 0)
    copy_words<std::uint16_t>(target, source, bytes);
  else
    copy_words<unsigned char>(target, source, bytes);
}

TROUPE_DEVICE std::uint64_t signature_of(const message& x) {
  return message_signature(x.bytes, x.tag);
}

/// Returns the packets of a pushed message that go over a channel.
TROUPE_DEVICE range packets_of(const message& x, unsigned channel) {
  const std::size_t all = x.bytes == 0 ? 1 : (x.bytes + packet_bytes - 1) / packet_bytes;
  return range_of(all, channel, x.share);
}

/// Returns the bytes of a put message that one channel's block writes.
TROUPE_DEVICE range bytes_of(const message& x, unsigned channel) {
  return range_of(x.bytes, channel, x.share * put_unit);
}

/// One block's end of a channel. All threads of the block call its functions. Each returns false if
/// the kernels are to end.
class channel_end {
public:
  TROUPE_DEVICE channel_end(const plane& p, unsigned peer, unsigned channel, bool sends)
      : p_(p), peer_(peer), channel_(channel), sends_(sends) {
    const auto numbers = numbers_of(p, peer, channel);
    number_ = sends ? numbers.sent : numbers.received;
    read_ = read_by_peer(numbers);
  }

  /// Keeps the numbers for the next kernel.
  TROUPE_DEVICE void keep() const {
    if (gpu::thread() != 0)
      return;
    if (sends_)
      keep_sent(p_, peer_, channel_, number_, read_);
    else
      keep_received(p_, peer_, channel_, number_);
  }

  TROUPE_DEVICE bool push(const message& x) {
    const range share = packets_of(x, channel_);
    const auto* from = static_cast<const unsigned char*>(x.memory);
    const bool aligned = is_aligned<std::uint64_t>(from);
    bool alive = true;
    for (std::size_t base = share.begin; alive && base < share.end; base += slot_packets) {
      ++number_;
      alive = wait_for_slot(p_, peer_, channel_, number_, read_);
      if (alive && base == share.begin && gpu::thread() == 0)
        sign(p_, peer_, channel_, number_, signature_of(x));
      packet* slot = slot_at(p_, peer_, channel_, number_);
      for (std::size_t j = gpu::thread(); alive && j < slot_packets && base + j < share.end;
           j += gpu::threads())
        send(slot + j, load_packet_data(from, x.bytes, base + j, aligned), number_);
    }
    return !gpu::sync_or(!alive);
  }

  TROUPE_DEVICE bool receive_pushed(const message& x) {
    const range share = packets_of(x, channel_);
    auto* to = static_cast<unsigned char*>(x.memory);
    const bool aligned = is_aligned<std::uint64_t>(to);
    bool alive = true;
    for (std::size_t base = share.begin; alive && base < share.end; base += slot_packets) {
      ++number_;
      if (base == share.begin && gpu::thread() == gpu::threads() - 1)
        alive = is_agreed(x);
      const packet* slot = slot_from(p_, peer_, channel_, number_);
      for (std::size_t j = gpu::thread(); alive && j < slot_packets && base + j < share.end;
           j += gpu::threads()) {
        std::uint64_t data = 0;
        alive = receive(p_, slot + j, number_, data);
        if (alive)
          store_packet_data(to, x.bytes, base + j, aligned, data);
      }
      alive = !gpu::sync_or(!alive);
      if (alive)
        end_message();
    }
    return alive;
  }

  /// Writes the data to where the receiver wants it. `wanted_at`: in memory of the block. As in
  /// `meet`, a thread looks for an abort in any case.
  TROUPE_DEVICE bool put(const message& x, std::uint64_t& wanted_at) {
    const range share = bytes_of(x, channel_);
    ++number_;
    bool alive = gpu::thread() != gpu::threads() - 1 || may_write(p_);
    if (gpu::thread() == 0) {
      alive &= wait_until_free(p_, peer_, channel_, number_, read_);
      if (alive)
        sign(p_, peer_, channel_, number_, signature_of(x));
      const unsigned place = number_ % slots;
      alive = alive &&
              agrees(p_, peer_, &own(p_).signed_by_receiver[peer_][channel_][place], number_,
                     signature_of(x)) &&
              receive(p_, &own(p_).wanted_at[peer_][channel_][place], number_, wanted_at);
      gpu::fence_system();
      clear_wanted(p_, peer_, channel_, number_);
    }
    if (gpu::sync_or(!alive))
      return false;
    auto* to = reinterpret_cast<unsigned char*>(static_cast<std::uintptr_t>(wanted_at));
    const auto* from = static_cast<const unsigned char*>(x.memory);
    for (std::size_t at = share.begin;;) {
      const bool is_last = share.end - at <= put_between_looks;
      copy_bytes(to + at, from + at, is_last ? share.end - at : put_between_looks);
      if (is_last)
        break;
      at += put_between_looks;
      if (gpu::sync_or(gpu::thread() == 0 && is_stopped(p_)))
        return false;
    }
    gpu::sync();
    if (gpu::thread() == 0) {
      gpu::fence_system();
      send(slot_at(p_, peer_, channel_, number_), 0, number_);
    }
    return true;
  }

  TROUPE_DEVICE bool receive_put(const message& x) {
    ++number_;
    bool alive = true;
    if (gpu::thread() == 0) {
      arena& theirs = *p_.at[peer_];
      const unsigned place = number_ % slots;
      if (is_signed(p_))
        send(&theirs.signed_by_receiver[p_.rank][channel_][place], signature_of(x), number_);
      send(&theirs.wanted_at[p_.rank][channel_][place], reinterpret_cast<std::uintptr_t>(x.memory),
           number_);
      std::uint64_t nothing = 0;
      alive =
          is_agreed(x) && receive(p_, slot_from(p_, peer_, channel_, number_), number_, nothing);
      gpu::fence_system();
    }
    alive = !gpu::sync_or(!alive);
    if (alive)
      end_message();
    return alive;
  }

private:
  /// Compares a message with what its sender sends. By one thread.
  TROUPE_DEVICE bool is_agreed(const message& x) const {
    return agrees(p_, peer_, signature_from(p_, peer_, channel_, number_), number_,
                  signature_of(x));
  }

  TROUPE_DEVICE void end_message() const {
    clear_slot(p_, peer_, channel_, number_);
    if (gpu::thread() == 0)
      acknowledge(p_, peer_, channel_, number_);
  }

  const plane& p_;
  const unsigned peer_;
  const unsigned channel_;
  const bool sends_;
  std::uint32_t number_; ///< of the last message
  std::uint32_t read_;   ///< by the peer
};

/// Copies the messages of a rank to itself.
template <std::size_t Most>
TROUPE_DEVICE void copy_to_itself(const plane& p, const move_arguments<Most>& a) {
  const unsigned channel = gpu::block_x();
  for (std::uint32_t i = 0; i + 1 < a.count; ++i) {
    const message& from = a.list[i];
    const message& to = a.list[i + 1];
    if (from.peer != p.rank || !from.is_sent)
      continue;
    const range share = bytes_of(from, channel);
    copy_bytes(static_cast<unsigned char*>(to.memory) + share.begin,
               static_cast<const unsigned char*>(from.memory) + share.begin,
               share.end - share.begin);
  }
}

/// Sends the messages to one peer, or receives those from it, in their order. Every pair, direction
/// and channel has a block of its own, so that none waits for another one.
/// @shape a grid of channels * (2 * size) blocks; wanted_at: in memory of the block
template <std::size_t Most>
TROUPE_DEVICE void move(const plane& p, const move_arguments<Most>& a, std::uint64_t& wanted_at) {
  const unsigned channel = gpu::block_x();
  const bool sends = gpu::block_y() < p.size;
  const unsigned peer = gpu::block_y() % p.size;
  channel_end here{p, peer, channel, sends};
  const bool begun = begin_kernel(p);
  bool alive = begun;
  const bool is_own = peer == p.rank;
  if (alive && is_own && sends)
    copy_to_itself(p, a);
  for (std::uint32_t i = 0; alive && i < a.count; ++i) {
    const message& x = a.list[i];
    if (is_own || x.peer != peer || x.is_sent != sends)
      continue;
    if (x.way == route::push)
      alive = sends ? here.push(x) : here.receive_pushed(x);
    else if (!is_empty(bytes_of(x, channel)))
      alive = sends ? here.put(x, wanted_at) : here.receive_put(x);
  }
  if (alive && !is_own)
    here.keep();
  end_kernel(p, begun, alive);
}

} // namespace troupe::detail::direct
