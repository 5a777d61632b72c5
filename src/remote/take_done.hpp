/// Takes finished items out of a list of started ones.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace troupe::detail {

/// Takes the items for which `is_done` is true out of `all`, in the order of their start, while
/// more are finished. Asks from the last to the first: if items finish in order, no item stays that
/// was done before a taken one.
template <class T, class F> std::vector<T> take_done(std::vector<T>& all, F is_done) {
  std::vector<bool> done(all.size());
  for (auto i = all.size(); i-- > 0;)
    done[i] = is_done(all[i]);
  std::vector<T> result;
  if (std::find(done.begin(), done.end(), true) == done.end())
    return result;
  std::vector<T> open;
  for (std::size_t i = 0; i < all.size(); ++i)
    (done[i] ? result : open).push_back(std::move(all[i]));
  all.swap(open);
  return result;
}

} // namespace troupe::detail
