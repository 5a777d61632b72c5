/// Calls on a communicator that is without some of its world's ranks.
#pragma once

#include "core/rank_call.hpp"

#include <cstddef>
#include <deque>
#include <vector>

namespace troupe::detail {

class communicator;

/// What one rank calls on such a communicator, in the place of what it would call on one of all
/// ranks.
struct fewer_calls {
  /// Before the calls, in the stream: where ranks are missing, this rank's part of a buffer that is
  /// gathered in place comes to lie further in front.
  struct move {
    void* target = nullptr;
    const void* source = nullptr;
    std::size_t size_bytes = 0;
  };
  std::vector<collective_call> calls;
  std::vector<move> moves;
  std::deque<exchange_plan> plans; ///< of the calls
};

/// Adds what `call` comes to; it lives as long as `to` does. Every rank that `call` names is there.
void add_with_fewer_ranks(const rank_call& call, const communicator& on, fewer_calls& to);

} // namespace troupe::detail
