/// Direct collectives: small messages, at most one to each peer and one from it.
#pragma once

#include "backend/cuda/direct_channel.hpp"
#include "backend/cuda/direct_elements.hpp"
#include "backend/cuda/direct_layout.hpp"

#include <cstddef>
#include <cstdint>

namespace troupe::detail::direct {

/// The part that one thread has in one of a block's messages: the packets of one channel, at most a
/// slot. A group of threads does each message, so that all are done at the same time.
class trade_part {
public:
  template <std::size_t Most>
  TROUPE_DEVICE trade_part(const plane& p, const move_arguments<Most>& a)
      : p_(p), channel_(gpu::block_x()), each_(1u << a.log2_threads),
        lane_(gpu::thread() & (each_ - 1)) {
    const std::uint32_t i = gpu::thread() >> a.log2_threads;
    if (i >= a.count)
      return;
    const message& x = a.list[i];
    peer_ = x.peer;
    bytes_ = static_cast<std::uint32_t>(x.bytes);
    tag_ = x.tag;
    if (x.peer != p.rank)
      does_ = x.is_sent ? action::send : action::receive;
    else if (x.is_sent) // the message after it is received
      does_ = action::copy;
    else
      return;
    from_ = static_cast<const unsigned char*>(x.memory);
    to_ = static_cast<unsigned char*>(does_ == action::copy ? a.list[i + 1].memory : x.memory);
    // Not in 64 bits, which would take the device twice as many instructions.
    const std::uint32_t all = bytes_ == 0 ? 1 : (bytes_ + packet_bytes - 1) / packet_bytes;
    const std::uint32_t share =
        does_ == action::copy ? x.share * (put_unit / packet_bytes) : x.share;
    begin_ = share * channel_ < all ? share * channel_ : all;
    end_ = all - begin_ < share ? all : begin_ + share;
    const std::uint32_t whole = is_aligned<std::uint64_t>(from_) && is_aligned<std::uint64_t>(to_)
                                    ? bytes_ / packet_bytes
                                    : 0;
    words_end_ = whole < begin_ ? begin_ : whole < end_ ? whole : end_;
  }

  /// Loads the first packets, at the same time as the numbers are loaded.
  TROUPE_DEVICE void load_first() {
    if (does_ == action::receive)
      return;
    load_words(begin_ + lane_);
    if (words_end_ + lane_ < end_)
      odd_ = load_packet_data(from_, bytes_, words_end_ + lane_, false);
  }

  /// By all threads of the group. Returns false if the kernels are to end.
  TROUPE_DEVICE bool run(const shared_numbers& last) {
    const bool sends = does_ == action::send;
    number_ = (sends ? last.sent : last.received)[peer_] + 1;
    read_ = last.read[peer_];
    if (begin_ == end_)
      return true;
    if (sends && !wait_for_slot(p_, peer_, channel_, number_, read_))
      return false;
    if (sends && lane_ == 0)
      sign(p_, peer_, channel_, number_, message_signature(bytes_, tag_));
    if (does_ == action::receive && lane_ == each_ - 1 &&
        !agrees(p_, peer_, signature_from(p_, peer_, channel_, number_), number_,
                message_signature(bytes_, tag_)))
      return false;
    packet* slot =
        (sends ? slot_at(p_, peer_, channel_, number_) : slot_from(p_, peer_, channel_, number_)) -
        begin_;
    for (std::uint32_t at = begin_ + lane_; at < words_end_; at += packets_at_once * each_) {
      if (at != begin_ + lane_)
        load_words(at);
      if (!do_words(slot, at))
        return false;
    }
    for (std::uint32_t i = words_end_ + lane_; i < end_; i += each_) {
      if (does_ == action::receive && !receive(p_, slot + i, number_, odd_))
        return false;
      if (does_ != action::receive && i != words_end_ + lane_)
        odd_ = load_packet_data(from_, bytes_, i, false);
      if (sends)
        send(slot + i, odd_, number_);
      else
        store_packet_data(to_, bytes_, i, false, odd_);
    }
    return true;
  }

  /// Keeps the numbers for the next kernel, and clears the slot if it is time to. By all threads of
  /// the group, after all have read the slot.
  TROUPE_DEVICE void keep() const {
    if (begin_ == end_)
      return;
    if (does_ == action::send && lane_ == 0)
      keep_sent(p_, peer_, channel_, number_, read_);
    if (does_ != action::receive)
      return;
    if (lane_ == 0)
      keep_received(p_, peer_, channel_, number_);
    if (!is_clearing(number_))
      return;
    packet* slot = slot_from(p_, peer_, channel_, number_);
    for (unsigned i = lane_; i < slot_packets; i += each_)
      gpu::store(slot + i, packet{});
    if (lane_ == 0)
      gpu::store(signature_from(p_, peer_, channel_, number_), packet{});
    gpu::fence_system();
  }

  /// Frees the slot, after all threads of the group are done with `keep`.
  TROUPE_DEVICE void free_slot() const {
    if (does_ == action::receive && lane_ == 0 && begin_ != end_)
      acknowledge(p_, peer_, channel_, number_);
  }

private:
  enum class action : std::uint8_t { nothing, send, receive, copy };

  TROUPE_DEVICE void load_words(std::uint32_t at) {
    TROUPE_UNROLL
    for (unsigned u = 0; u < packets_at_once; ++u)
      if (at + u * each_ < words_end_)
        data_[u] = reinterpret_cast<const std::uint64_t*>(from_)[at + u * each_];
  }

  /// Sends what was loaded, or stores it, or stores what arrives.
  TROUPE_DEVICE bool do_words(packet* slot, std::uint32_t at) {
    TROUPE_UNROLL
    for (unsigned u = 0; u < packets_at_once; ++u) {
      const std::uint32_t i = at + u * each_;
      if (i >= words_end_)
        break;
      if (does_ == action::receive && !receive(p_, slot + i, number_, data_[u]))
        return false;
      if (does_ == action::send)
        send(slot + i, data_[u], number_);
      else
        reinterpret_cast<std::uint64_t*>(to_)[i] = data_[u];
    }
    return true;
  }

  const plane& p_;
  const unsigned channel_;
  const std::uint32_t each_; ///< threads of the group
  const std::uint32_t lane_; ///< of this thread in it
  action does_ = action::nothing;
  unsigned peer_ = 0;
  const unsigned char* from_ = nullptr;
  unsigned char* to_ = nullptr;
  std::uint32_t bytes_ = 0; ///< of the whole message
  std::uint8_t tag_ = 0;
  std::uint32_t begin_ = 0;     ///< of the channel's packets of the message
  std::uint32_t words_end_ = 0; ///< of those of them that are words in memory
  std::uint32_t end_ = 0;
  std::uint32_t number_ = 0;
  std::uint32_t read_ = 0; ///< by the peer
  std::uint64_t data_[packets_at_once] = {};
  std::uint64_t odd_ = 0; ///< a packet behind the words
};

/// Does messages as `move` does. All are done at the same time, and none waits for another one: the
/// peer frees a slot in a kernel that comes before its part of this one.
/// @shape messages as `fits_trade` says; a grid of channels; `a.count` groups of threads, and at
///        least one thread for each rank
template <std::size_t Most>
TROUPE_DEVICE void trade(const plane& p, const move_arguments<Most>& a, shared_numbers& last) {
  last.load_from(p, gpu::block_x());
  trade_part part{p, a};
  part.load_first();
  const bool begun = begin_kernel(p);
  const bool alive = !gpu::sync_or(!(begun && part.run(last)));
  if (alive)
    part.keep();
  end_kernel(p, begun, alive);
  if (alive)
    part.free_slot();
}

} // namespace troupe::detail::direct
