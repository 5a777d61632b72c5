/// Direct collectives: reductions of memory that all ranks can access.
#pragma once

#include "backend/cuda/direct_channel.hpp"
#include "backend/cuda/direct_elements.hpp"
#include "backend/cuda/direct_layout.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace troupe::detail::direct {

/// Combines elements [begin, end) of all ranks, in the order of ranks, and writes them to all
/// targets. `Unrolled` vectors at a time are read from each of two ranks, or half as many from each
/// of four.
template <class T, unsigned Unrolled> struct pulled {
  using group = elements<T, gpu::vector>;

  const plane& p;
  const reduce_arguments& a;
  const T* const* ins;
  T* const* outs;
  const scaling<T>* scale;

  TROUPE_DEVICE void single(std::size_t i) const {
    wide<T> result = widen(scale[0](ins[0][i]));
    for (unsigned rank = 1; rank < p.size; ++rank)
      result = combine(a.op, result, widen(scale[rank](ins[rank][i])));
    const T x = finished<T>(a, p.size, result);
    for (unsigned rank = 0; rank < p.size; ++rank)
      if (outs[rank] != nullptr)
        outs[rank][i] = x;
  }

  static TROUPE_DEVICE gpu::vector* vectors(T* from, std::size_t offset) {
    return reinterpret_cast<gpu::vector*>(from + offset);
  }

  template <unsigned N>
  TROUPE_DEVICE void add(wide<T> (&result)[N][group::count], const gpu::vector (&x)[N],
                         unsigned rank) const {
    TROUPE_UNROLL
    for (unsigned u = 0; u < N; ++u) {
      const auto all = group::from(x[u]);
      TROUPE_UNROLL
      for (unsigned k = 0; k < group::count; ++k) {
        const auto y = widen(scale[rank](all.at[k]));
        result[u][k] = rank == 0 ? y : combine(a.op, result[u][k], y);
      }
    }
  }

  /// Vectors `first + u * stride` from element `offset` on, for all u < N. Those of `Ranks` ranks
  /// are read at once.
  template <unsigned N, unsigned Ranks>
  TROUPE_DEVICE void several(std::size_t offset, std::size_t first, unsigned stride) const {
    wide<T> result[N][group::count];
    for (unsigned begin = 0; begin < p.size; begin += Ranks) {
      gpu::vector x[Ranks][N];
      TROUPE_UNROLL
      for (unsigned k = 0; k < Ranks; ++k) {
        if (k != 0 && begin + k >= p.size)
          continue;
        const gpu::vector* from = vectors(const_cast<T*>(ins[begin + k]), offset) + first;
        TROUPE_UNROLL
        for (unsigned u = 0; u < N; ++u)
          x[k][u] = from[u * stride];
      }
      TROUPE_UNROLL
      for (unsigned k = 0; k < Ranks; ++k)
        if (k == 0 || begin + k < p.size)
          add(result, x[k], begin + k);
    }
    gpu::vector sums[N];
    TROUPE_UNROLL
    for (unsigned u = 0; u < N; ++u) {
      group all;
      TROUPE_UNROLL
      for (unsigned k = 0; k < group::count; ++k)
        all.at[k] = finished<T>(a, p.size, result[u][k]);
      sums[u] = all.word();
    }
    for (unsigned step = 1; step <= p.size; ++step) { // not all ranks write to the same one at once
      const unsigned next = p.rank + step;
      const unsigned rank = next < p.size ? next : next - p.size;
      if (outs[rank] == nullptr)
        continue;
      gpu::vector* to = vectors(outs[rank], offset) + first;
      TROUPE_UNROLL
      for (unsigned u = 0; u < N; ++u)
        to[u * stride] = sums[u];
    }
  }

  /// Returns how far all ranks' memory is from a multiple of a vector's size, the same for all; or
  /// that size if it differs.
  TROUPE_DEVICE unsigned misalignment(std::size_t begin) const {
    constexpr unsigned width = sizeof(gpu::vector);
    const auto of = [=](const T* x) {
      return static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(x + begin) % width);
    };
    const unsigned first = of(ins[0]);
    for (unsigned rank = 0; rank < p.size; ++rank)
      if (of(ins[rank]) != first || (outs[rank] != nullptr && of(outs[rank]) != first))
        return width;
    return first;
  }

  /// Returns false if the kernels are to end.
  TROUPE_DEVICE bool run(range share) const {
    const unsigned stride = gpu::grid_x() * gpu::threads();
    const std::size_t first = std::size_t{gpu::block_x()} * gpu::threads() + gpu::thread();
    const std::size_t count = share.end - share.begin;
    const unsigned off = misalignment(share.begin);
    if (off == sizeof(gpu::vector)) {
      std::size_t i = first;
      return each(i, 1, stride, count, [&] { single(share.begin + i); });
    }
    const std::size_t to_boundary = off == 0 ? 0 : (sizeof(gpu::vector) - off) / sizeof(T);
    const std::size_t head = to_boundary < count ? to_boundary : count;
    const std::size_t all = (count - head) / group::count;
    const std::size_t tail = head + all * group::count;
    for (std::size_t i = first; i < head; i += stride)
      single(share.begin + i);
    for (std::size_t i = tail + first; i < count; i += stride)
      single(share.begin + i);
    const std::size_t begin = share.begin + head;
    std::size_t i = first;
    if (p.size > 2 && many > 2) {
      constexpr unsigned n = (Unrolled + 1) / 2;
      if (!each(i, n, stride, all, [&] { several<n, many>(begin, i, stride); }))
        return false;
    } else if (!each(i, Unrolled, stride, all, [&] { several<Unrolled, 2>(begin, i, stride); }))
      return false;
    if constexpr (Unrolled > 2)
      for (; i + stride < all; i += 2 * stride)
        several<2, 2>(begin, i, stride);
    for (; i < all; i += stride)
      several<1, many>(begin, i, stride);
    return true;
  }

private:
  /// The ranks from which vectors are read at once, if there are so many.
  static constexpr unsigned many = sizeof(T) > 1 ? 4 : 2;

  /// Calls `f` while there are `n` more up to `end`, `stride` apart, from `i` on. Returns false if
  /// the kernels are to end.
  template <class F>
  TROUPE_DEVICE bool each(std::size_t& i, unsigned n, unsigned stride, std::size_t end, F f) const {
    while (i + (n - 1) * stride < end) {
      for (unsigned k = 0; k < pulled_between_looks && i + (n - 1) * stride < end; ++k) {
        f();
        i += n * stride;
      }
      if (is_stopped(p))
        return false;
    }
    return true;
  }
};

/// The facts that the ranks tell each other, in memory of the block.
template <class T> struct shared_facts {
  shared_numbers numbers;
  const T* ins[most_ranks];
  T* outs[most_ranks]; ///< null: the rank does not get the result
  scaling<T> scale[most_ranks];
};

/// The facts that a rank tells its peers, in a packet each.
enum class fact : std::uint32_t { in, out, factor, has_factor };
inline constexpr unsigned facts = 4;

template <class T>
TROUPE_DEVICE std::uint64_t own_fact(const plane& p, const reduce_arguments& a, fact which) {
  const auto scale = scaling_of<T>(a, p.size);
  std::uint64_t result = 0;
  switch (which) {
  case fact::in:
    return reinterpret_cast<std::uintptr_t>(a.in);
  case fact::out:
    return (a.targets >> p.rank & 1) != 0 ? reinterpret_cast<std::uintptr_t>(a.out) : 0;
  case fact::factor:
    std::memcpy(&result, &scale.factor, sizeof(T));
    return result;
  case fact::has_factor:
    return scale.is_on ? 1 : 0;
  }
  return 0;
}

template <class T>
TROUPE_DEVICE void note(shared_facts<T>& all, unsigned rank, fact which, std::uint64_t data) {
  switch (which) {
  case fact::in:
    all.ins[rank] = reinterpret_cast<const T*>(static_cast<std::uintptr_t>(data));
    break;
  case fact::out:
    all.outs[rank] = reinterpret_cast<T*>(static_cast<std::uintptr_t>(data));
    break;
  case fact::factor:
    all.scale[rank].factor = elements<T, std::uint64_t>::from(data).at[0];
    break;
  case fact::has_factor:
    all.scale[rank].is_on = data != 0;
    break;
  }
}

/// Sends packet `place` of the `n`th message to a peer, and receives that of the peer. What the
/// block did before is done for the peer then, and the other way round.
TROUPE_DEVICE bool swap_packets(const plane& p, const shared_numbers& last, unsigned peer,
                                std::uint32_t n, unsigned place, std::uint64_t& data) {
  const unsigned channel = gpu::block_x();
  const std::uint32_t number = last.sent[peer] + n;
  // As in `push_block::send_to_all`.
  if (!wait_for_slot(p, peer, channel, number, n > 1 ? number - slots : last.read[peer]))
    return false;
  gpu::fence_system();
  send(slot_at(p, peer, channel, number) + place, data, number);
  const std::uint32_t awaited = last.received[peer] + n;
  const bool there = receive(p, slot_from(p, peer, channel, awaited) + place, awaited, data);
  gpu::fence_system();
  return there;
}

/// Compares the call with that of `peer`. By one thread. Returns false if the kernels are to end.
TROUPE_DEVICE bool swap_signatures(const plane& p, const shared_numbers& last, unsigned peer,
                                   std::uint64_t signature) {
  if (!is_signed(p) || peer == p.rank)
    return true;
  const unsigned channel = gpu::block_x();
  const std::uint32_t number = last.sent[peer] + 1;
  if (!wait_for_slot(p, peer, channel, number, last.read[peer]))
    return false;
  sign(p, peer, channel, number, signature);
  const std::uint32_t awaited = last.received[peer] + 1;
  return agrees(p, peer, signature_from(p, peer, channel, awaited), awaited, signature);
}

/// Waits until the kernels of all ranks run, and exchanges the facts. Returns false if the kernels
/// are to end. A peer whose facts are there may have been aborted long ago, so one thread looks for
/// that in any case, while the others wait.
template <class T>
TROUPE_DEVICE bool meet(const plane& p, const reduce_arguments& a, shared_facts<T>& all) {
  bool alive = gpu::thread() != gpu::threads() - 1 || may_write(p);
  for (unsigned i = gpu::thread(); alive && i < p.size * (1 + facts); i += gpu::threads()) {
    if (i < p.size) { // first: the facts of a peer with another call may never come
      alive = swap_signatures(p, all.numbers, i, a.signature);
      continue;
    }
    const unsigned rank = (i - p.size) / facts;
    const unsigned place = (i - p.size) % facts;
    const auto which = static_cast<fact>(place);
    std::uint64_t data = own_fact<T>(p, a, which);
    if (rank != p.rank)
      alive = swap_packets(p, all.numbers, rank, 1, place, data);
    if (alive)
      note(all, rank, which, data);
  }
  return !gpu::sync_or(!alive);
}

/// Waits until all ranks have read what they need, and written what others need. `alive`: this
/// thread has.
template <class T> TROUPE_DEVICE bool part(const plane& p, const shared_facts<T>& all, bool alive) {
  if (gpu::sync_or(!alive))
    return false;
  const unsigned peer = gpu::thread();
  if (peer < p.size && peer != p.rank) {
    std::uint64_t nothing = 0;
    alive = swap_packets(p, all.numbers, peer, 2, 0, nothing);
  }
  return !gpu::sync_or(!alive);
}

/// Each rank combines its share of all ranks' memory, and writes it to the memory of all targets.
template <class T, unsigned Unrolled>
TROUPE_DEVICE void pull_reduce(const plane& p, const reduce_arguments& a, shared_facts<T>& all) {
  const unsigned channel = gpu::block_x();
  const unsigned me = gpu::thread();
  all.numbers.load_from(p, channel);
  const bool begun = begin_kernel(p);
  bool alive = begun && meet(p, a, all);
  if (alive) {
    all.numbers.end_messages(p, channel, 1, true);
    if (a.scatters != 0) { // the result goes to this rank alone, at the place of its block
      if (me < p.size)
        all.outs[me] = me == p.rank ? static_cast<T*>(a.out) - p.rank * a.count : nullptr;
      gpu::sync();
    }
    alive = pulled<T, Unrolled>{p, a, all.ins, all.outs, all.scale}.run(
        a.scatters != 0 ? range{p.rank * a.count, (p.rank + 1) * a.count}
                        : range_of(a.count, p.rank, a.share));
    alive = part(p, all, alive);
  }
  if (alive) {
    all.numbers.end_messages(p, channel, 2, true);
    all.numbers.note_mutual(p, channel, 2);
  }
  end_kernel(p, begun, alive);
}

} // namespace troupe::detail::direct
