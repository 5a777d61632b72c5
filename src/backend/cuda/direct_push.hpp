/// Direct collectives: reductions through the slots of channels. They work on any memory.
#pragma once

#include "backend/cuda/direct_channel.hpp"
#include "backend/cuda/direct_elements.hpp"
#include "backend/cuda/direct_layout.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace troupe::detail::direct {

/// One block's part of such a reduction.
template <class T> class push_block {
public:
  TROUPE_DEVICE push_block(const plane& p, const reduce_arguments& a, const shared_numbers& last)
      : p_(p), a_(a), last_(last), scale_(scaling_of<T>(a, p.size)),
        in_(static_cast<const T*>(a.in)), own_(in_ + (a.scatters != 0 ? p.rank * a.count : 0)),
        in_aligned_(is_aligned<std::uint64_t>(in_) &&
                    (a.scatters == 0 || a.count * sizeof(T) % sizeof(std::uint64_t) == 0)),
        out_aligned_(is_aligned<std::uint64_t>(a.out)) {}

  TROUPE_DEVICE bool is_target(unsigned rank) const { return (a_.targets >> rank & 1) != 0; }
  /// Returns whether each rank sends to each other one.
  TROUPE_DEVICE bool is_mutual() const { return a_.targets == (1u << p_.size) - 1; }

  /// Returns packet `i` of what the rank itself adds to its result.
  TROUPE_DEVICE std::uint64_t own_data(std::size_t i) const { return load(own_, i); }

  /// Says to one peer which call begins. By all threads. Like the functions below, it returns false
  /// if the kernels are to end.
  TROUPE_DEVICE bool sign_call() const {
    const unsigned peer = peer_of_thread();
    if (!is_signed(p_) || peer >= p_.size || peer == p_.rank || !is_target(peer))
      return true;
    const std::uint32_t number = last_.sent[peer] + 1;
    if (!wait_for_slot(p_, peer, gpu::block_x(), number, last_.read[peer]))
      return false;
    sign(p_, peer, gpu::block_x(), number, a_.signature);
    return true;
  }

  /// Compares the call with that of one peer. By all threads, each before it waits for data.
  TROUPE_DEVICE bool is_agreed() const {
    const unsigned peer = peer_of_thread();
    if (!is_signed(p_) || peer >= p_.size || peer == p_.rank || !is_target(p_.rank))
      return true;
    const std::uint32_t number = last_.received[peer] + 1;
    return agrees(p_, peer, signature_from(p_, peer, gpu::block_x(), number), number, a_.signature);
  }

  /// Sends packet `i` of the data, which is packet `place` of a message.
  TROUPE_DEVICE bool send_to_all(std::uint64_t own_data, std::size_t i, std::size_t place,
                                 std::uint32_t message) const {
    for (unsigned step = 1; step < p_.size; ++step) {
      const unsigned next = p_.rank + step;
      const unsigned peer = next < p_.size ? next : next - p_.size;
      if (!is_target(peer))
        continue;
      const std::uint32_t number = last_.sent[peer] + message;
      // After the first of mutual messages, the slot is free: see `note_mutual`.
      const auto read = message > 1 && is_mutual() ? number - slots : last_.read[peer];
      if (!wait_for_slot(p_, peer, gpu::block_x(), number, read))
        return false;
      send(slot_at(p_, peer, gpu::block_x(), number) + place,
           a_.scatters != 0 ? load(in_ + peer * a_.count, i) : own_data, number);
    }
    return true;
  }

  /// Receives that packet from all ranks.
  TROUPE_DEVICE bool combine_all(std::uint64_t own_data, std::size_t i, std::size_t place,
                                 std::uint32_t message) const {
    if (!is_target(p_.rank))
      return true;
    wide<T> result[group::count] = {};
    for (unsigned rank = 0; rank < p_.size; ++rank) {
      std::uint64_t data = own_data;
      if (rank != p_.rank) {
        const std::uint32_t number = last_.received[rank] + message;
        if (!receive(p_, slot_from(p_, rank, gpu::block_x(), number) + place, number, data))
          return false;
      }
      const auto all = group::from(data);
      TROUPE_UNROLL
      for (unsigned k = 0; k < group::count; ++k)
        result[k] = rank == 0 ? widen(all.at[k]) : combine(a_.op, result[k], widen(all.at[k]));
    }
    group all;
    TROUPE_UNROLL
    for (unsigned k = 0; k < group::count; ++k)
      all.at[k] = finished<T>(a_, p_.size, result[k]);
    store_packet_data(static_cast<T*>(a_.out), a_.count, i, out_aligned_, all.word());
    return true;
  }

private:
  using group = elements<T, std::uint64_t>;

  /// Returns the peer whose signature the thread does, if there is one: threads at the end of
  /// a block have less data.
  static TROUPE_DEVICE unsigned peer_of_thread() { return gpu::threads() - 1 - gpu::thread(); }

  TROUPE_DEVICE std::uint64_t load(const T* from, std::size_t i) const {
    const std::uint64_t data = load_packet_data(from, a_.count, i, in_aligned_);
    if (!scale_.is_on)
      return data;
    auto all = group::from(data);
    TROUPE_UNROLL
    for (unsigned k = 0; k < group::count; ++k)
      all.at[k] = scale_(all.at[k]);
    return all.word();
  }

  const plane& p_;
  const reduce_arguments& a_;
  const shared_numbers& last_;
  const scaling<T> scale_;
  const T* const in_;
  const T* const own_; ///< what the rank itself adds to its result
  const bool in_aligned_;
  const bool out_aligned_;
};

/// Each rank sends its elements to all targets, which combine them in the order of ranks.
template <class T>
TROUPE_DEVICE void push_reduce(const plane& p, const reduce_arguments& a, shared_numbers& last) {
  const unsigned channel = gpu::block_x();
  const unsigned me = gpu::thread();
  last.load_from(p, channel);
  const push_block<T> block{p, a, last};
  constexpr std::size_t per_packet = sizeof(std::uint64_t) / sizeof(T);
  const range share = range_of((a.count + per_packet - 1) / per_packet, channel, a.share);
  const bool receives = block.is_target(p.rank);
  // Loaded at the same time as the numbers.
  std::uint64_t data = share.begin + me < share.end ? block.own_data(share.begin + me) : 0;
  const bool begun = begin_kernel(p);
  bool alive = begun && (is_empty(share) || block.sign_call());
  std::uint32_t messages = 0;
  for (std::size_t base = share.begin; alive && base < share.end; base += slot_packets) {
    ++messages;
    for (std::size_t j = me; alive && j < slot_packets && base + j < share.end;
         j += gpu::threads()) {
      if (base + j != share.begin + me)
        data = block.own_data(base + j);
      alive = block.send_to_all(data, base + j, j, messages) &&
              (base + j != share.begin + me || block.is_agreed()) &&
              block.combine_all(data, base + j, j, messages);
    }
    if (alive && messages == 1 && share.begin + me >= share.end)
      alive = block.is_agreed();
    alive = !gpu::sync_or(!alive);
    if (alive && receives)
      last.end_messages(p, channel, messages, block.is_mutual());
  }
  if (alive && block.is_mutual()) {
    last.note_mutual(p, channel, messages);
  } else if (alive && me < p.size && me != p.rank) {
    if (block.is_target(me))
      keep_sent(p, me, channel, last.sent[me] + messages, last.read[me]);
    if (receives)
      keep_received(p, me, channel, last.received[me] + messages);
  }
  end_pushing_kernel(p, begun, alive);
}

} // namespace troupe::detail::direct
