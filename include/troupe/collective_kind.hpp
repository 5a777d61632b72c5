/// The kinds of work that the ranks of a world do together.
#pragma once

#include <troupe/detail/caf_compat.hpp>

#include <cstdint>
#include <string_view>

namespace troupe {

/// n: number of ranks; q, r: ranks; i: from 0 to `count` - 1, where no other count is named.
enum class collective_kind : std::uint8_t {
  all_reduce,     ///< recv[i] = op over all q of send_q[i]
  reduce,         ///< the same on the root alone
  broadcast,      ///< recv[i] = send_root[i]
  all_gather,     ///< recv[q * count + i] = send_q[i]
  reduce_scatter, ///< recv_r[i] = op over all q of send_q[r * count + i]
  all_to_all,     ///< recv_r[q * count + i] = send_q[r * count + i]
  all_to_all_v,   ///< recv_r[recv_offsets[q] + i] = send_q[send_offsets[r] + i], counts per pair
  gather,         ///< all_gather on the root alone
  scatter,        ///< recv_r[i] = send_root[r * count + i]
  send,           ///< `count` elements to the rank `peer`, which receives as many
  recv,           ///< `count` elements from the rank `peer`; a rank's call alone (`rank_local`):
                  ///< for the whole world a message is one `send` (`send_recv`)
  barrier,        ///< nobody passes before all have come
};

inline constexpr collective_kind all_collective_kinds[] = {
    collective_kind::all_reduce,   collective_kind::reduce,         collective_kind::broadcast,
    collective_kind::all_gather,   collective_kind::reduce_scatter, collective_kind::all_to_all,
    collective_kind::all_to_all_v, collective_kind::gather,         collective_kind::scatter,
    collective_kind::send,         collective_kind::recv,           collective_kind::barrier};

/// Does it combine elements by a `reduce_op`?
constexpr bool reduces(collective_kind x) noexcept {
  return x == collective_kind::all_reduce || x == collective_kind::reduce ||
         x == collective_kind::reduce_scatter;
}

constexpr bool has_root(collective_kind x) noexcept {
  return x == collective_kind::reduce || x == collective_kind::broadcast ||
         x == collective_kind::gather || x == collective_kind::scatter;
}

/// From one rank to another.
constexpr bool is_message(collective_kind x) noexcept {
  return x == collective_kind::send || x == collective_kind::recv;
}

/// The enumerator's name; lives forever.
std::string_view to_string(collective_kind x) noexcept;
TROUPE_INSPECT_ENUM(collective_kind)

} // namespace troupe
