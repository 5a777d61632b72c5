/// The kinds of operations in which several ranks of a world take part.
#pragma once

#include <troupe/detail/caf_compat.hpp>

#include <cstdint>
#include <string_view>

namespace troupe {

/// In the formulas, n is the number of ranks, q and r are ranks, and i runs from 0 to `count` - 1
/// unless another count is named.
enum class collective_kind : std::uint8_t {
  all_reduce,     ///< recv[i] = op over all q of send_q[i]
  reduce,         ///< all_reduce with the result on the root only
  broadcast,      ///< recv[i] = send_root[i]
  all_gather,     ///< recv[q * count + i] = send_q[i]
  reduce_scatter, ///< recv_r[i] = op over all q of send_q[r * count + i]
  all_to_all,     ///< recv_r[q * count + i] = send_q[r * count + i]
  all_to_all_v,   ///< recv_r[recv_offsets[q] + i] = send_q[send_offsets[r] + i], counts per pair
  gather,         ///< all_gather with the result on the root only
  scatter,        ///< recv_r[i] = send_root[r * count + i]
  send,           ///< sends `count` elements to rank `peer`, which receives as many
  recv,           ///< receives `count` elements from rank `peer`; only as a rank-local call
                  ///< (`rank_local`). For the whole world, a message is one `send` (`send_recv`)
  barrier,        ///< no rank passes before all ranks have arrived
};

inline constexpr collective_kind all_collective_kinds[] = {
    collective_kind::all_reduce,   collective_kind::reduce,         collective_kind::broadcast,
    collective_kind::all_gather,   collective_kind::reduce_scatter, collective_kind::all_to_all,
    collective_kind::all_to_all_v, collective_kind::gather,         collective_kind::scatter,
    collective_kind::send,         collective_kind::recv,           collective_kind::barrier};

/// Returns whether the operation combines elements with a `reduce_op`.
constexpr bool reduces(collective_kind x) noexcept {
  return x == collective_kind::all_reduce || x == collective_kind::reduce ||
         x == collective_kind::reduce_scatter;
}

constexpr bool has_root(collective_kind x) noexcept {
  return x == collective_kind::reduce || x == collective_kind::broadcast ||
         x == collective_kind::gather || x == collective_kind::scatter;
}

/// Returns whether the operation is a message from one rank to another.
constexpr bool is_message(collective_kind x) noexcept {
  return x == collective_kind::send || x == collective_kind::recv;
}

/// Returns the enumerator's name, which is never freed.
std::string_view to_string(collective_kind x) noexcept;
TROUPE_INSPECT_ENUM(collective_kind)

} // namespace troupe
