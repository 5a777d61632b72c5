/// Objects of the process that threads, destructors of static objects and exit handlers may use
/// until the process ends.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace troupe::detail {

/// Returns the one `T` of the process. It is made at the first call and never destroyed.
template <class T> T& never_destroyed() {
  static T* const instance = new T;
  return *instance;
}

/// Keeps `x`, which an abandoned thread may still use, until the process ends.
inline void keep_forever(std::shared_ptr<void> x) {
  struct kept_objects {
    std::mutex mutex;
    std::vector<std::shared_ptr<void>> all;
  };
  auto& kept = never_destroyed<kept_objects>();
  std::lock_guard lock{kept.mutex};
  kept.all.push_back(std::move(x));
}

} // namespace troupe::detail
