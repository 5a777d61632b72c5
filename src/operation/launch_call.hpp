/// Calls of the launches of users.
#pragma once

#include <troupe/backend.hpp>
#include <troupe/detail/user_call.hpp>
#include <troupe/error.hpp>

#include <cstdint>
#include <exception>
#include <string_view>

namespace troupe::detail {

/// Calls `f`, which launches work and returns an error or none.
/// @errors errc::device_fault, launch_failed, unchanged; errc::launch_failed with any other error
///         or exception as its detail
template <class F> caf::error call_launch(F f) noexcept {
  try {
    const caf::error error = f();
    if (!error || code_of(error) == errc::device_fault || code_of(error) == errc::launch_failed)
      return error;
    return make_error(errc::launch_failed, describe(error));
  } catch (...) {
    return make_error(errc::launch_failed,
                      "the callable threw: " + exception_text(std::current_exception()));
  }
}

/// The same on the thread that drives `on`. A launch finds no CUDA error that other code has left
/// on the thread, and leaves none of its own.
/// @shape  name: of the launch; number: of its operation, or 0
template <class F>
caf::error call_launch_on(backend_device& on, std::string_view name, std::uint64_t number,
                          F f) noexcept {
  if (auto error = on.clear_last_error("before", name, number))
    return error;
  auto error = call_launch(f);
  if (auto fault = on.clear_last_error("after", name, number))
    return fault;
  return error;
}

} // namespace troupe::detail
