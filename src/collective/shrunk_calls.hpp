/// Calls on a communicator that is without some of its world's ranks.
#pragma once

#include "collective/rank_call.hpp"

#include <cstddef>
#include <deque>
#include <vector>

namespace troupe::detail {

class communicator;

/// The calls of one rank on such a communicator, in place of its calls on a communicator of all
/// ranks.
struct shrunk_calls {
  /// A copy in the same stream before the calls. If ranks are absent, this rank's part of a buffer
  /// that is gathered in place lies further to the front.
  struct move {
    void* target = nullptr;
    const void* source = nullptr;
    std::size_t size_bytes = 0;
  };
  std::vector<collective_call> calls;
  std::vector<move> moves;
  std::deque<exchange_plan> plans; ///< used by `calls`
};

/// Adds the calls that replace `call`, which outlives `to`. All ranks that it names are present.
void add_shrunk(const rank_call& call, const communicator& on, shrunk_calls& to);

} // namespace troupe::detail
