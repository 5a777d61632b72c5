/// Objects of the process that threads, destructors of static objects and exit handlers may use
/// until the process ends.
#pragma once

#include <memory>

namespace troupe::detail {

/// Returns the one `T` of the process. It is made at the first call and never destroyed.
template <class T> T& never_destroyed() {
  static T* const instance = new T;
  return *instance;
}

/// Keeps `x`, which an abandoned thread may still use, until the process ends.
void keep_forever(std::shared_ptr<void> x);

} // namespace troupe::detail
