/// The collectives and messages that a benchmark compares, as a table.
#pragma once

#include <troupe/collective_kind.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace bench {

enum class verb_kind : std::uint8_t {
  all_reduce, ///< in place; all others have a buffer for each direction
  reduce,
  broadcast,
  all_gather,
  reduce_scatter,
  all_to_all,
  gather,
  scatter,
  send_recv, ///< one message, from rank 0 to rank 1
  exchange,  ///< each rank sends to the next one, the last rank to rank 0
  barrier,   ///< has no buffers
};

/// The ranks that have a buffer, and the number of its blocks.
struct buffer_rule {
  enum class holders : std::uint8_t { none, root, second, all };

  holders held_by = holders::none;
  bool per_rank = false; ///< one block for each rank, in rank order; else one block

  bool held(std::size_t rank) const noexcept {
    return held_by == holders::all || (held_by == holders::root && rank == 0) ||
           (held_by == holders::second && rank == 1);
  }
  std::size_t blocks(std::size_t ranks) const noexcept {
    return held_by == holders::none ? 0 : per_rank ? ranks : 1;
  }
  /// Returns the index of the block that is for `rank`, or from it.
  std::size_t block_of(std::size_t rank) const noexcept { return per_rank ? rank : 0; }
};

/// A kind of operation. The root is rank 0, and sums are of float32.
struct verb {
  verb_kind kind;
  std::string_view name;
  troupe::collective_kind call; ///< of a rank; for a message, at the root's end
  buffer_rule send;
  buffer_rule recv;
  bool sums = false; ///< of all ranks
  std::size_t least_ranks = 1;

  bool in_place() const noexcept { return kind == verb_kind::all_reduce; }

  /// Returns whether `from` has a block for `to`, in a verb that only moves data.
  bool moves(std::size_t from, std::size_t to, std::size_t ranks) const noexcept {
    return send.held(from) && recv.held(to) && (!rotates() || to == (from + 1) % ranks);
  }

  /// Returns the rank whose data `rank` has in block `block` of its result, in a verb that only
  /// moves data.
  std::size_t source_of(std::size_t rank, std::size_t block, std::size_t ranks) const noexcept {
    if (rotates())
      return (rank + ranks - 1) % ranks;
    return recv.per_rank ? block : 0;
  }

  /// Returns the number of blocks in the larger buffer of a rank.
  std::size_t most_blocks(std::size_t ranks) const noexcept {
    return std::max(send.blocks(ranks), recv.blocks(ranks));
  }

  /// Returns the ratio of bus bandwidth to the bytes of a block in the time of an operation; 0 if
  /// there are no bytes.
  /// @source nccl-tests, doc/PERFORMANCE.md; there the size of verbs with a block for each rank is
  ///         that of all blocks
  double bus_factor(std::size_t ranks) const noexcept;

private:
  bool rotates() const noexcept { return kind == verb_kind::exchange; }
};

/// Returns all verbs, in the order of `verb_kind`.
std::span<const verb> all_verbs() noexcept;
/// Returns the verb of that name; null if there is none.
const verb* find_verb(std::string_view name) noexcept;

} // namespace bench
