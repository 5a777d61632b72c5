/// Requests of which many are outstanding.
#pragma once

#include "must.hpp"

#include <cstddef>
#include <deque>
#include <type_traits>

namespace bench {

/// Waits for what `issue(k)` gives, for each k < `operations`; at most `window` are outstanding.
template <class F> void keep_in_flight(std::size_t operations, std::size_t window, F issue) {
  std::deque<std::invoke_result_t<F&, std::size_t>> unfinished;
  for (std::size_t k = 0; k < operations; ++k) {
    unfinished.push_back(issue(k));
    if (unfinished.size() == window) {
      must(unfinished.front().wait());
      unfinished.pop_front();
    }
  }
  for (auto& x : unfinished)
    must(x.wait());
}

} // namespace bench
