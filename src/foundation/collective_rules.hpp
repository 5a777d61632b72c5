/// The rules of the collective verbs: which ranks send and receive, and how much.
#pragma once

#include <troupe/collective_kind.hpp>
#include <troupe/dtype.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string_view>

namespace troupe::detail {

/// The ranks that have a buffer for one direction, and its length. A block has `count` elements; in
/// an all_to_all_v the exchange plan has the length of each block.
struct buffer_rule {
  enum class holders : std::uint8_t { none, root, all };

  holders held_by = holders::none;
  bool per_rank = false; ///< one block for each rank of the world, in rank order; else one block
  bool optional = false; ///< without it, each rank uses its own block of the other buffer

  constexpr bool held(bool at_root) const noexcept {
    return held_by == holders::all || (at_root && held_by == holders::root);
  }
  constexpr std::size_t blocks(std::size_t ranks) const noexcept { return per_rank ? ranks : 1; }
  /// Returns the index of the block that is for `rank`, or from it.
  constexpr std::size_t block_of(std::size_t rank) const noexcept { return per_rank ? rank : 0; }
};

/// `reduces`, `has_root` and `is_message` say the rest.
struct collective_rules {
  std::string_view name;
  buffer_rule send;
  buffer_rule recv;
  bool pairwise = false; ///< moves data by messages between pairs of ranks

  constexpr bool per_rank() const noexcept { return send.per_rank || recv.per_rank; }
  /// Returns whether one buffer may be the rank's own block of the other one.
  constexpr bool has_in_place_form() const noexcept { return !send.per_rank || !recv.per_rank; }
};

namespace rule {
using enum buffer_rule::holders;
inline constexpr buffer_rule nothing{};
inline constexpr buffer_rule block{all};
inline constexpr buffer_rule blocks{all, true};
inline constexpr buffer_rule block_at_root{root};
inline constexpr buffer_rule blocks_at_root{root, true};
inline constexpr buffer_rule block_if_given{all, false, true};

/// By kind; the last one is for unknown kinds.
inline constexpr collective_rules table[] = {
    {.name = "all_reduce", .send = block, .recv = block_if_given},
    {.name = "reduce", .send = block, .recv = block_at_root},
    {.name = "broadcast", .send = block_at_root, .recv = block},
    {.name = "all_gather", .send = block_if_given, .recv = blocks},
    {.name = "reduce_scatter", .send = blocks, .recv = block_if_given},
    {.name = "all_to_all", .send = blocks, .recv = blocks, .pairwise = true},
    {.name = "all_to_all_v", .send = blocks, .recv = blocks, .pairwise = true},
    {.name = "gather", .send = block, .recv = blocks_at_root, .pairwise = true},
    {.name = "scatter", .send = blocks_at_root, .recv = block, .pairwise = true},
    {.name = "send", .send = block, .recv = nothing, .pairwise = true},
    {.name = "recv", .send = nothing, .recv = block, .pairwise = true},
    {.name = "barrier", .send = nothing, .recv = nothing},
    {.name = "unknown", .send = nothing, .recv = nothing},
};
static_assert(std::size(table) == std::size(all_collective_kinds) + 1);
} // namespace rule

constexpr bool is_known(collective_kind x) noexcept { return x <= collective_kind::barrier; }

constexpr const collective_rules& rules_of(collective_kind x) noexcept {
  return rule::table[std::min(static_cast<std::size_t>(x), std::size(rule::table) - 1)];
}

/// Returns whether a call names a root, or the other rank of a message.
constexpr bool has_peer(collective_kind x) noexcept { return has_root(x) || is_message(x); }

/// Returns whether one buffer of `x` has a block for each rank, and the other buffer is the block
/// of `rank` in it.
/// @shape Call: has `what`, `send`, `recv`, `count` and `type` as `collective_call` has them
template <class Call> bool uses_own_block(const Call& x, std::size_t rank) noexcept {
  const auto& rules = rules_of(x.what);
  const auto own = [&](const void* memory, const buffer_rule& of) {
    return reinterpret_cast<std::uintptr_t>(memory) + of.block_of(rank) * x.count * size_of(x.type);
  };
  return rules.send.per_rank != rules.recv.per_rank &&
         own(x.send, rules.send) == own(x.recv, rules.recv);
}

} // namespace troupe::detail
