/// Direct collectives: small messages, at most one to each peer and one from it.
#pragma once

#include "backend/cuda/direct_channel.hpp"
#include "backend/cuda/direct_elements.hpp"
#include "backend/cuda/direct_layout.hpp"
#include "backend/cuda/direct_move.hpp"

#include <cstddef>
#include <cstdint>

namespace troupe::detail::direct {

/// One block's part of such messages: their packets in one channel, at most a slot of each.
template <std::size_t Most> class trade_block {
public:
  TROUPE_DEVICE trade_block(const plane& p, const move_arguments<Most>& a,
                            const shared_numbers& last)
      : p_(p), a_(a), last_(last), channel_(gpu::block_x()) {}

  /// Loads the first packet that this thread sends.
  TROUPE_DEVICE void load_first() {
    for (first_ = 0; first_ < a_.count; ++first_) {
      const message& x = a_.list[first_];
      const range share = share_of_channel(x);
      const std::size_t j = first_packet_of(first_);
      if (!x.is_sent || j >= share.end - share.begin)
        continue;
      data_ = load(x, share.begin + j);
      return;
    }
  }

  TROUPE_DEVICE bool send_all() const {
    bool alive = true;
    for (std::uint32_t i = 0; alive && i < a_.count; ++i)
      if (a_.list[i].is_sent)
        alive = send_part(i);
    return alive;
  }

  TROUPE_DEVICE bool receive_all() const {
    bool alive = true;
    for (std::uint32_t i = 0; alive && i < a_.count; ++i)
      if (!a_.list[i].is_sent)
        alive = receive_part(i);
    return alive;
  }

  /// Copies what the rank sends to itself.
  TROUPE_DEVICE void copy_own() const {
    for (std::uint32_t i = 0; i + 1 < a_.count; ++i) {
      const message& from = a_.list[i];
      if (from.peer != p_.rank || !from.is_sent)
        continue;
      const range share = bytes_of(from, channel_);
      auto* to = static_cast<unsigned char*>(a_.list[i + 1].memory);
      for (std::size_t j = share.begin / packet_bytes + first_packet_of(i);
           j * packet_bytes < share.end; j += gpu::threads())
        store_packet_data(to, from.bytes, j, is_aligned<std::uint64_t>(to), load(from, j));
    }
  }

  /// Clears the slots, and keeps the numbers for the next kernel. By all threads of the block,
  /// after they have read the slots.
  TROUPE_DEVICE void end_messages() const {
    for (std::uint32_t i = 0; i < a_.count; ++i) {
      const message& x = a_.list[i];
      if (!x.is_sent && !is_empty(share_of_channel(x)))
        clear_slot(p_, x.peer, channel_, last_.received[x.peer] + 1);
    }
    for_each_of_thread([this](const message& x) {
      if (x.is_sent)
        keep_sent(p_, x.peer, channel_, last_.sent[x.peer] + 1, last_.read[x.peer]);
      else
        keep_received(p_, x.peer, channel_, last_.received[x.peer] + 1);
    });
  }

  /// Frees the slots. Nothing waits for that as long as the peer does not send more.
  TROUPE_DEVICE void acknowledge_all() const {
    for_each_of_thread([this](const message& x) {
      if (!x.is_sent)
        acknowledge(p_, x.peer, channel_, last_.received[x.peer] + 1);
    });
  }

private:
  /// Calls `f` with each message over this channel, each by one thread.
  template <class F> TROUPE_DEVICE void for_each_of_thread(F f) const {
    for (std::uint32_t i = gpu::thread(); i < a_.count; i += gpu::threads())
      if (!is_empty(share_of_channel(a_.list[i])))
        f(a_.list[i]);
  }

  /// Returns the packets of a message over this channel; none if the rank sends it to itself.
  TROUPE_DEVICE range share_of_channel(const message& x) const {
    return x.peer == p_.rank ? range{0, 0} : packets_of(x, channel_);
  }

  /// Each message begins with other threads, so that several small ones are sent at the same time.
  TROUPE_DEVICE std::size_t first_packet_of(std::uint32_t i) const {
    constexpr unsigned warp = 32;
    return (gpu::thread() + warp * i) % gpu::threads();
  }

  static TROUPE_DEVICE std::uint64_t load(const message& x, std::size_t packet) {
    const auto* from = static_cast<const unsigned char*>(x.memory);
    return load_packet_data(from, x.bytes, packet, is_aligned<std::uint64_t>(from));
  }

  TROUPE_DEVICE bool send_part(std::uint32_t i) const {
    const message& x = a_.list[i];
    const range share = share_of_channel(x);
    const std::uint32_t number = last_.sent[x.peer] + 1;
    const std::size_t first = first_packet_of(i);
    for (std::size_t j = first; j < share.end - share.begin; j += gpu::threads()) {
      const std::uint64_t data = i == first_ && j == first ? data_ : load(x, share.begin + j);
      if (!wait_for_slot(p_, x.peer, channel_, number, last_.read[x.peer]))
        return false;
      send(slot_at(p_, x.peer, channel_, number) + j, data, number);
    }
    return true;
  }

  TROUPE_DEVICE bool receive_part(std::uint32_t i) const {
    const message& x = a_.list[i];
    const range share = share_of_channel(x);
    const std::uint32_t number = last_.received[x.peer] + 1;
    auto* to = static_cast<unsigned char*>(x.memory);
    for (std::size_t j = first_packet_of(i); j < share.end - share.begin; j += gpu::threads()) {
      std::uint64_t data = 0;
      if (!receive(p_, slot_from(p_, x.peer, channel_, number) + j, number, data))
        return false;
      store_packet_data(to, x.bytes, share.begin + j, is_aligned<std::uint64_t>(to), data);
    }
    return true;
  }

  const plane& p_;
  const move_arguments<Most>& a_;
  const shared_numbers& last_;
  const unsigned channel_;
  std::uint32_t first_ = 0; ///< the message of `data_`; `a_.count`: there is none
  std::uint64_t data_ = 0;
};

/// Does messages as `move` does. A block sends all of them before it waits for any: what a slot
/// waits for is read by a kernel before this one.
/// @shape messages as `fits_trade` says; a grid of channels
template <std::size_t Most>
TROUPE_DEVICE void trade(const plane& p, const move_arguments<Most>& a, shared_numbers& last) {
  last.load_from(p, gpu::block_x());
  trade_block<Most> block{p, a, last};
  block.load_first();
  if (!begin_kernel(p))
    return end_kernel(p, false);
  bool alive = block.send_all();
  if (alive) {
    block.copy_own();
    alive = block.receive_all();
  }
  alive = !gpu::sync_or(!alive);
  if (alive)
    block.end_messages();
  end_kernel(p, alive);
  if (alive)
    block.acknowledge_all();
}

} // namespace troupe::detail::direct
