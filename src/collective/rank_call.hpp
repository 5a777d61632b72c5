/// One rank's part in a collective or in a message between two ranks, taken from a request and
/// checked.
#pragma once

#include "foundation/rank_set.hpp"
#include <troupe/backend.hpp>
#include <troupe/collective.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace troupe::detail {

class lane;

/// A `collective` without copies of its handles.
struct collective_view {
  collective_kind kind = collective_kind::all_reduce;
  std::span<const any_gpu_ref> send;
  std::span<const any_gpu_ref> recv;
  reduce_op op = reduce_op::sum;
  std::span<const double> factors = {};
  int rank = -1;
  int peer = -1;
  std::span<const std::vector<std::uint64_t>> counts = {};

  collective_view(collective_kind what, std::span<const any_gpu_ref> from,
                  std::span<const any_gpu_ref> to, reduce_op how,
                  std::span<const double> multipliers)
      : kind(what), send(from), recv(to), op(how), factors(multipliers) {}
  /// Views one rank's call. A handle without memory is left out.
  collective_view(collective_kind what, const any_gpu_ref& from, const any_gpu_ref& to,
                  reduce_op how, int root_or_peer)
      : kind(what), send(&from, from ? 1 : 0), recv(&to, to ? 1 : 0), op(how), peer(root_or_peer) {}
  explicit collective_view(const collective& x)
      : kind(x.kind), send(x.send), recv(x.recv), op(x.op), factors(x.factors), rank(x.rank),
        peer(x.peer), counts(x.counts) {}
};

/// A range of bytes of a buffer; valid as long as the handle that it was taken from.
struct memory_range {
  const any_gpu_ref* of = nullptr;
  std::size_t begin = 0;
  std::size_t end = 0;
  std::size_t count = 0; ///< elements

  explicit operator bool() const noexcept { return of != nullptr; }
  /// Compares the buffers too: another buffer may have had the same address before.
  bool same_as(const memory_range& other) const noexcept {
    return of->memory() == other.of->memory() && begin == other.begin && end == other.end;
  }
};

/// Returns whether two ranges share memory.
inline bool overlap(const memory_range& a, const memory_range& b) noexcept {
  return a && b && a.of->memory() == b.of->memory() && a.begin < b.end && b.begin < a.end;
}

struct rank_call {
  std::size_t rank = 0;
  collective_call call;
  std::unique_ptr<exchange_plan> plan;
  std::array<std::byte, 8> factor{};
  memory_range send; // valid until the operation is made
  memory_range recv;

  bool is_message() const noexcept { return troupe::is_message(call.what); }
  /// Returns whether the call moves no data.
  bool empty() const noexcept {
    return call.count == 0 && call.what != collective_kind::barrier && !plan;
  }
  /// Returns the call for the backend; valid as long as this.
  collective_call complete() const noexcept {
    auto result = call;
    if (call.op == reduce_op::premul_sum)
      result.factor = factor.data();
    result.plan = plan.get();
    return result;
  }
};

/// Adds to `to` the calls of the ranks that take part in `x`, a collective over all ranks, in rank
/// order, or a message between two of them, the sender's first. Rank i is on lanes[i]. Ranks of
/// `absent` are left out, and their handles are not read.
/// @errors errc::invalid_argument, shape_mismatch, stale_ref; errc::unavailable: the root, or one
///         end of a message, is absent; all with rank and device
caf::error add_rank_calls(std::vector<rank_call>& to, const char* verb, const collective_view& x,
                          std::span<const std::shared_ptr<lane>> lanes, rank_set absent = {});

/// Returns the call of rank `rank` alone in `x`. `send`, `recv` and `factors` hold at most the
/// rank's own handle or factor. `counts` holds what it sends to and receives from each rank.
/// @errors as `add_rank_calls`
caf::expected<rank_call> rank_call_of(const char* verb, const collective_view& x, std::size_t rank,
                                      std::span<const std::shared_ptr<lane>> lanes,
                                      rank_set absent = {});

/// Returns the calls of rank `x.rank`, which is in range, for the messages of `x`: the sends, then
/// the receives.
/// @errors as `add_rank_calls`
caf::expected<std::vector<rank_call>> exchange_calls(const char* verb, const exchange& x,
                                                     std::span<const std::shared_ptr<lane>> lanes,
                                                     rank_set absent = {});

/// Returns the text for `count` elements.
std::string elements(std::size_t count);

/// Returns whether two calls of one rank share memory that one of them writes.
bool conflict(const rank_call& a, const rank_call& b) noexcept;

/// Returns whether two ranks' calls are the same, except memory and plans.
bool alike(const rank_call& a, const rank_call& b) noexcept;

/// Returns how two ranks' calls, made separately, differ; empty if they belong together.
std::string difference(const rank_call& a, const rank_call& b);

/// The index of a rank's call in its operation, and the index of the part that the call belongs to.
struct call_slot {
  std::size_t call;
  std::size_t part;
};

/// Returns the slot of `x`, a call for the world without the ranks in `absent`.
inline call_slot slot_of(const rank_call& x, rank_set absent) noexcept {
  if (!x.is_message()) {
    auto i = x.rank - absent.below(x.rank);
    return {i, i};
  }
  auto peer = static_cast<std::size_t>(x.call.peer);
  if (x.rank == peer)
    return {x.call.what == collective_kind::send ? 0u : 1u, 0};
  auto i = x.rank < peer ? 0u : 1u;
  return {i, i};
}

/// Calls `add` with each use of memory by `call`, which belongs to part `index`.
template <class F> void add_uses(const rank_call& call, std::size_t index, F add) {
  auto range = [&](const memory_range& r, bool reads, bool writes) {
    add({r.of->memory(), r.begin, r.end, reads, writes, static_cast<std::uint32_t>(index)});
  };
  if (call.send && call.recv && call.send.same_as(call.recv))
    return range(call.recv, true, true);
  if (call.send)
    range(call.send, true, false);
  if (call.recv)
    range(call.recv, false, true);
}

} // namespace troupe::detail
