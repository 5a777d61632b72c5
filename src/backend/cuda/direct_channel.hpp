/// Direct collectives: how the kernels use channels.
///
/// The code of the kernels is in the headers direct_*.hpp. It calls what a GPU thread can do by the
/// functions of namespace `gpu`, which direct.cu defines for the device and the tests for host
/// threads.
///
/// Every wait looks at `arena::stop` from time to time, and more rarely at `plane::aborted`. A
/// block that was told to end writes nothing to memory of the user any more, and its channels are
/// not used again.
#pragma once

#include "backend/cuda/direct_layout.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace troupe::detail::direct {

TROUPE_DEVICE arena& own(const plane& p) { return *p.at[p.rank]; }

/// Returns whether a kernel of some rank was aborted.
TROUPE_DEVICE bool is_stopped(const plane& p) { return gpu::load(&own(p).stop) != 0; }

/// Returns whether the host aborted the kernels, and then tells the other threads of this rank,
/// which look at pinned memory more rarely.
TROUPE_DEVICE bool is_aborted(const plane& p) {
  if (gpu::load(p.aborted) == 0)
    return false;
  gpu::store(&own(p).stop, 1);
  return true;
}

/// Waits until `f` returns true. Returns false if the kernels are to end. A device does its looks
/// at pinned memory one after the other, so mainly the first warp of each block looks there.
template <class F> TROUPE_DEVICE bool wait_until(const plane& p, F f) {
  const unsigned before_abort_check =
      gpu::thread() < gpu::warp ? gpu::looks_of_first_warp : gpu::looks_of_other_warps;
  for (unsigned looks = 1; !f(); ++looks, gpu::pause())
    if (looks % gpu::looks_before_stop_check == 0 &&
        (is_stopped(p) || (looks % before_abort_check == 0 && is_aborted(p))))
      return false;
  return true;
}

/// The mark has the low 31 bits of the number. It is never 0, as in a cleared packet.
TROUPE_DEVICE std::uint32_t mark_of(std::uint32_t number) { return number << 1 | 1; }

// -- channels

TROUPE_DEVICE packet* slot_at(const plane& p, unsigned peer, unsigned channel,
                              std::uint32_t number) {
  return p.at[peer]->slot[p.rank][channel][number % slots];
}

TROUPE_DEVICE packet* slot_from(const plane& p, unsigned peer, unsigned channel,
                                std::uint32_t number) {
  return own(p).slot[peer][channel][number % slots];
}

TROUPE_DEVICE packet* signature_at(const plane& p, unsigned peer, unsigned channel,
                                   std::uint32_t number) {
  return &p.at[peer]->signed_by_sender[p.rank][channel][number % slots];
}

TROUPE_DEVICE packet* signature_from(const plane& p, unsigned peer, unsigned channel,
                                     std::uint32_t number) {
  return &own(p).signed_by_sender[peer][channel][number % slots];
}

/// Returns whether it is time to clear the slot and the place of a message.
TROUPE_DEVICE bool is_clearing(std::uint32_t number) { return number % clearing_period < slots; }

/// Returns whether number `a` is `b` or a later one.
TROUPE_DEVICE bool has_reached(std::uint32_t a, std::uint32_t b) {
  return static_cast<std::int32_t>(a - b) >= 0;
}

/// Returns the numbers of the last messages as they are counted.
TROUPE_DEVICE channel_numbers numbers_of(const plane& p, unsigned peer, unsigned channel) {
  auto x = gpu::load(&own(p).numbers[peer][channel]);
  x.sent += p.first;
  x.received += p.first;
  x.read += p.first;
  return x;
}

/// Keeps the number of the last message that was sent, and of the last that the peer has read, for
/// the next kernel.
TROUPE_DEVICE void keep_sent(const plane& p, unsigned peer, unsigned channel, std::uint32_t sent,
                             std::uint32_t read) {
  auto& numbers = own(p).numbers[peer][channel];
  gpu::store(&numbers.sent, sent - p.first);
  gpu::store(&numbers.read, read - p.first);
}

TROUPE_DEVICE void keep_received(const plane& p, unsigned peer, unsigned channel,
                                 std::uint32_t received) {
  gpu::store(&own(p).numbers[peer][channel].received, received - p.first);
}

/// Clears what a receiver writes for a message that is put to it, if it is time to. Called before
/// message `number` is sent, and after what it needs was read: the receiver writes there again only
/// for a later message.
TROUPE_DEVICE void clear_wanted(const plane& p, unsigned peer, unsigned channel,
                                std::uint32_t number) {
  if (!is_clearing(number))
    return;
  gpu::store(&own(p).wanted_at[peer][channel][number % slots], packet{});
  gpu::store(&own(p).signed_by_receiver[peer][channel][number % slots], packet{});
  gpu::fence_system();
}

/// Waits until the slot of message `number` to `peer` is free. Each thread that sends a part of the
/// message calls it before, and others of its block may. `read`: a message that the peer is known
/// to have read. Only what the peer acknowledges of the last messages counts, up to this one, which
/// other threads may have sent: other numbers are older.
TROUPE_DEVICE bool wait_until_free(const plane& p, unsigned peer, unsigned channel,
                                   std::uint32_t number, std::uint32_t read) {
  if (has_reached(read, number - slots))
    return true;
  const std::uint32_t* acknowledged = &own(p).numbers[peer][channel].acknowledged;
  return wait_until(p, [=] { return gpu::load(acknowledged) - (number - slots) <= slots; });
}

/// The same for a message that is not put.
TROUPE_DEVICE bool wait_for_slot(const plane& p, unsigned peer, unsigned channel,
                                 std::uint32_t number, std::uint32_t read) {
  clear_wanted(p, peer, channel, number);
  return wait_until_free(p, peer, channel, number, read);
}

TROUPE_DEVICE void send(packet* to, std::uint64_t data, std::uint32_t number) {
  const auto mark = mark_of(number);
  gpu::store(to, packet{static_cast<std::uint32_t>(data), mark,
                        static_cast<std::uint32_t>(data >> 32), mark});
}

TROUPE_DEVICE bool receive(const plane& p, const packet* from, std::uint32_t number,
                           std::uint64_t& data) {
  const auto mark = mark_of(number);
  packet x;
  const bool there = wait_until(p, [&] {
    x = gpu::load(from);
    return x.low_mark == mark && x.high_mark == mark;
  });
  data = std::uint64_t{x.high} << 32 | x.low;
  return there;
}

// -- signatures
//
// Ranks whose calls come from programs that know nothing of each other compare them: the first
// message of a call, on each channel, has the signature of its sender's call.

TROUPE_DEVICE bool is_signed(const plane& p) { return p.found != nullptr; }

TROUPE_DEVICE void store(mismatch* to, const mismatch& x) {
  gpu::store(&to->rank, x.rank);
  gpu::store(&to->peer, x.peer);
  for (unsigned half = 0; half < 2; ++half) {
    gpu::store(&to->own[half], x.own[half]);
    gpu::store(&to->theirs[half], x.theirs[half]);
  }
  gpu::fence_system();
  gpu::store(&to->is_there, 1);
}

/// The same as `signature_of`, on the device.
TROUPE_DEVICE std::uint64_t message_signature(std::uint64_t bytes, std::uint8_t tag) {
  return bytes << signature_bytes_shift | tag;
}

/// Tells all ranks that a call of this rank does not match that of `peer`, and their kernels to
/// end. Returns false.
TROUPE_DEVICE_RARE bool report_mismatch(const plane& p, unsigned peer, std::uint64_t mine,
                                        std::uint64_t theirs) {
  if (gpu::add(&own(p).mismatches, 1) != 0)
    return false; // one is enough
  mismatch x;
  x.rank = p.rank;
  x.peer = peer;
  for (unsigned half = 0; half < 2; ++half) {
    x.own[half] = static_cast<std::uint32_t>(mine >> 32 * half);
    x.theirs[half] = static_cast<std::uint32_t>(theirs >> 32 * half);
  }
  for (unsigned rank = 0; rank < p.size; ++rank)
    store(&p.at[rank]->mismatch_of[p.rank], x);
  gpu::fence_system();
  for (unsigned rank = 0; rank < p.size; ++rank)
    gpu::store(&p.at[rank]->stop, 1);
  return false;
}

/// Passes a mismatch on to the host. By one thread, before it reports the end of the kernel.
TROUPE_DEVICE_RARE void pass_mismatch_on(const plane& p) {
  gpu::fence_system();
  for (unsigned rank = 0; rank < p.size; ++rank) {
    mismatch& x = own(p).mismatch_of[rank];
    if (gpu::load(&x.is_there) == 0)
      continue;
    gpu::fence_system();
    mismatch copy;
    copy.rank = gpu::load(&x.rank);
    copy.peer = gpu::load(&x.peer);
    for (unsigned half = 0; half < 2; ++half) {
      copy.own[half] = gpu::load(&x.own[half]);
      copy.theirs[half] = gpu::load(&x.theirs[half]);
    }
    store(p.found, copy);
    gpu::fence_system();
    return;
  }
}

/// Signs message `number` to `peer`, which begins a call. By one thread, when its slot is free.
TROUPE_DEVICE void sign(const plane& p, unsigned peer, unsigned channel, std::uint32_t number,
                        std::uint64_t signature) {
  if (is_signed(p))
    send(signature_at(p, peer, channel, number), signature, number);
}

/// Waits for the signature of `peer` in `from`, and compares it. By one thread. Returns false if
/// the kernels are to end.
TROUPE_DEVICE bool agrees(const plane& p, unsigned peer, const packet* from, std::uint32_t number,
                          std::uint64_t signature) {
  std::uint64_t theirs = signature;
  if (is_signed(p) && !receive(p, from, number, theirs))
    return false;
  return theirs == signature || report_mismatch(p, peer, signature, theirs);
}

/// Clears the slot of message `number` from `peer`, if it is time to. By all threads of the block,
/// before the acknowledgement.
TROUPE_DEVICE void clear_slot(const plane& p, unsigned peer, unsigned channel,
                              std::uint32_t number) {
  if (!is_clearing(number))
    return;
  packet* slot = slot_from(p, peer, channel, number);
  for (unsigned i = gpu::thread(); i < slot_packets; i += gpu::threads())
    gpu::store(slot + i, packet{});
  if (gpu::thread() == 0)
    gpu::store(signature_from(p, peer, channel, number), packet{});
  gpu::fence_system();
  gpu::sync();
}

/// Tells `peer` that its message is not needed in its slot any more. By one thread, after the block
/// has read it.
TROUPE_DEVICE void acknowledge(const plane& p, unsigned peer, unsigned channel,
                               std::uint32_t number) {
  gpu::store(&p.at[peer]->numbers[p.rank][channel].acknowledged, number);
}

/// Called by all threads at the start of a kernel. Returns false if it must not run: a kernel was
/// aborted, so that its messages could meet others than theirs.
TROUPE_DEVICE bool begin_kernel(const plane& p) { return !gpu::sync_or(is_stopped(p)); }

/// Called by one thread of a block before the block writes to memory of peers' users. Returns false
/// if it must not. Either an aborted kernel of a peer sees that this one may be writing, or this
/// one sees that the other was aborted: each says so first, and then looks.
TROUPE_DEVICE bool may_write(const plane& p) {
  gpu::store(&own(p).writing, 1);
  gpu::fence_total();
  return !is_stopped(p);
}

/// Keeps an aborted kernel, and so all that is behind it in its stream, while kernels of peers may
/// write to its memory. By one thread, after all other blocks.
TROUPE_DEVICE void stay(const plane& p) {
  for (unsigned peer = 0; peer < p.size; ++peer)
    gpu::store(&p.at[peer]->stopped[p.rank], 1);
  gpu::fence_total();
  const std::uint64_t begin = gpu::nanoseconds();
  for (unsigned peer = 0; peer < p.size; ++peer)
    while (gpu::load(&own(p).stopped[peer]) == 0 && gpu::load(&p.at[peer]->writing) != 0 &&
           gpu::nanoseconds() - begin < longest_stay)
      gpu::pause();
  gpu::fence_system();
}

/// The last block of a kernel counts the others. These are the units for a block that is over, for
/// one that `begin_kernel` kept from running, and for one that was aborted.
inline constexpr std::uint32_t one_over = 1;
inline constexpr std::uint32_t one_kept = 1 << 10;
inline constexpr std::uint32_t one_aborted = 1 << 20;
static_assert(most_channels < one_kept && most_channels / 2 * 2 * most_ranks < one_kept);

/// Tells the kernels of all ranks to end. By one thread of a block that was aborted: it may have
/// written to memory of peers' users, who use it again now.
TROUPE_DEVICE void stop_all(const plane& p) {
  for (unsigned rank = 0; rank < p.size; ++rank)
    gpu::store(&p.at[rank]->stop, 1);
  gpu::fence_system();
}

TROUPE_DEVICE void note_reached(const plane& p) {
  if (p.reached != nullptr)
    gpu::store(p.reached, p.place);
}

/// Called by all threads at the end of a kernel. The last block reports the end of the kernel.
/// `begun`: by `begin_kernel`; `alive`: the block has done its work; both the same for all its
/// threads. A block that was kept from running was not aborted: no peer has met it.
///
/// The results are in memory of this device, which kernels, copies and peers reach through its L2
/// cache: a fence for the device is enough. One for the system takes 1.3 us longer.
TROUPE_DEVICE void end_kernel(const plane& p, bool begun, bool alive) {
  gpu::sync();
  if (gpu::thread() != 0)
    return;
  arena& mine = own(p);
  const std::uint32_t units = one_over + (!begun ? one_kept : alive ? 0 : one_aborted);
  std::uint32_t others = 0; // the units of the other blocks
  if (begun && !alive)
    stop_all(p);
  gpu::fence_device();
  const std::uint32_t blocks = gpu::grid_x() * gpu::grid_y();
  if (blocks > 1) {
    others = gpu::add(&mine.blocks_over, units);
    if (others % one_kept != blocks - 1)
      return;
    gpu::store(&mine.blocks_over, 0);
    gpu::fence_device();
  }
  if (units >= one_aborted || others >= one_aborted)
    stay(p);
  if (is_signed(p) && (units >= one_kept || others >= one_kept))
    pass_mismatch_on(p);
  gpu::store(&mine.writing, 0);
  note_reached(p);
  if (p.ended != nullptr)
    gpu::store(p.ended, p.number);
}

/// The same for a kernel that writes to no memory of peers' users. In a graph, whose next kernel
/// comes when all blocks are over, no block waits for the others: that would take 1 to 2 us.
TROUPE_DEVICE void end_pushing_kernel(const plane& p, bool begun, bool alive) {
  if (p.ended != nullptr || is_signed(p)) {
    end_kernel(p, begun, alive);
  } else if (gpu::thread() == 0) {
    if (begun && !alive) {
      stop_all(p);
      stay(p);
    } else if (gpu::block_x() == 0) {
      note_reached(p);
    }
  }
}

/// A range of what all channels, or all ranks, do together.
struct range {
  std::size_t begin;
  std::size_t end;
};

TROUPE_DEVICE bool is_empty(range x) { return x.begin == x.end; }

/// Returns the share of one of them, of `all`.
TROUPE_DEVICE range range_of(std::size_t all, unsigned index, std::size_t share) {
  const std::size_t begin = share * index < all ? share * index : all;
  return {begin, all - begin < share ? all : begin + share};
}

/// Returns the last of the sent messages that the peer is known to have read: the acknowledged one
/// if it is behind `read`, and not older than all.
TROUPE_DEVICE std::uint32_t read_by_peer(const channel_numbers& x) {
  return x.sent - x.acknowledged < x.sent - x.read ? x.acknowledged : x.read;
}

/// The numbers of the last messages of a block's channels, in memory of the block.
struct shared_numbers {
  std::uint32_t sent[most_ranks];
  std::uint32_t received[most_ranks];
  std::uint32_t read[most_ranks]; ///< by the peer

  /// By all threads; `begin_kernel` must follow.
  TROUPE_DEVICE void load_from(const plane& p, unsigned channel) {
    const unsigned peer = gpu::thread();
    if (peer >= p.size)
      return;
    const auto numbers = numbers_of(p, peer, channel);
    sent[peer] = numbers.sent;
    received[peer] = numbers.received;
    read[peer] = read_by_peer(numbers);
  }

  /// Frees the slots of the `n`th message from each peer since then. By all threads of the block,
  /// after they have read it. `is_mutual`: see `note_mutual`. Then it is acknowledged only from
  /// time to time, so that no old one is taken for a new one when the numbers begin again.
  TROUPE_DEVICE void end_messages(const plane& p, unsigned channel, std::uint32_t n,
                                  bool is_mutual) const {
    for (unsigned peer = 0; peer < p.size; ++peer)
      if (peer != p.rank)
        clear_slot(p, peer, channel, received[peer] + n);
    const unsigned peer = gpu::thread();
    if (peer < p.size && peer != p.rank && (!is_mutual || is_clearing(received[peer] + n)))
      acknowledge(p, peer, channel, received[peer] + n);
  }

  /// Notes that each rank has sent `n` messages to each other one, and received them, since then,
  /// and that no rank sent its next one before it had received all. By all threads of the block. No
  /// message has to be acknowledged: the peers have read all but the last one, and send their next
  /// ones only after they have read that one, too.
  TROUPE_DEVICE void note_mutual(const plane& p, unsigned channel, std::uint32_t n) const {
    const unsigned peer = gpu::thread();
    if (n == 0 || peer >= p.size || peer == p.rank)
      return;
    keep_sent(p, peer, channel, sent[peer] + n, sent[peer] + n - 1);
    keep_received(p, peer, channel, received[peer] + n);
  }
};

} // namespace troupe::detail::direct
