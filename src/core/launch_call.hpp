/// Calls of what users launch.
#pragma once

#include <troupe/error.hpp>

#include <exception>

namespace troupe::detail {

/// Calls `f`, which launches something, and gives an error or none.
/// @errors errc::device_fault, launch_failed, as they came; errc::launch_failed with what else
///         came, or was thrown, as its detail
template <class F> caf::error call_launch(F f) noexcept {
  try {
    const caf::error error = f();
    if (!error || code_of(error) == errc::device_fault || code_of(error) == errc::launch_failed)
      return error;
    return make_error(errc::launch_failed, describe(error));
  } catch (const std::exception& e) {
    return make_error(errc::launch_failed, e.what());
  } catch (...) {
    return make_error(errc::launch_failed,
                      "the callable threw something that is no std::exception");
  }
}

} // namespace troupe::detail
