/// Many requests in flight.
#pragma once

#include "must.hpp"

#include <cstddef>
#include <deque>
#include <type_traits>

namespace bench {

/// Waits for the results of `issue(k)`, k < `operations`, with at most `window` in flight.
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
