/// The place of one rank's call in its operation, and the memory that the call uses.
#pragma once

#include "collective/rank_call.hpp"
#include "foundation/rank_set.hpp"
#include <troupe/collective_kind.hpp>

#include <cstddef>
#include <cstdint>

namespace troupe::detail {

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
