/// Workers that have mapped something.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

namespace troupe::detail {

class worker_link;

/// Keeps no worker alive.
class worker_set {
public:
  bool contains(const worker_link& x) const {
    return std::ranges::any_of(all_, [&](auto& y) { return y.lock().get() == &x; });
  }
  void add(std::weak_ptr<worker_link> x) {
    std::erase_if(all_, [](auto& y) { return y.expired(); });
    all_.push_back(std::move(x));
  }
  /// Calls `f` with each worker that is still there.
  template <class F> void for_each(F f) const {
    for (auto& x : all_)
      if (const auto link = x.lock())
        f(*link);
  }

private:
  std::vector<std::weak_ptr<worker_link>> all_;
};

} // namespace troupe::detail
