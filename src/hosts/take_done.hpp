/// Taking out what is done of what was begun.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace troupe::detail {

/// Takes out of `all`, in the order in which it was begun, what `is_done` says, while more is being
/// done. What ends in its order leaves in its order: nothing stays that was done before something
/// that is taken, so it is asked from the last to the first.
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
