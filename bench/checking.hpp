/// Helpers for checks of contents.
#pragma once

#include <algorithm>
#include <cstddef>
#include <thread>
#include <vector>

namespace bench {

/// Runs `work(i)` for each i < `number`, each on its own thread.
template <class F> void for_each_at_once(std::size_t number, F work) {
  std::vector<std::thread> threads;
  threads.reserve(number);
  for (std::size_t i = 0; i < number; ++i)
    threads.emplace_back(work, i);
  for (auto& x : threads)
    x.join();
}

/// Runs `work(first, count)` for each piece of `total` elements, of at most `piece`.
template <class F> void for_pieces(std::size_t total, std::size_t piece, F work) {
  for (std::size_t first = 0; first < total; first += piece)
    work(first, std::min(piece, total - first));
}

} // namespace bench
