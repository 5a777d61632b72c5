/// Calls of the launches of users.
#pragma once

#include "operation/operation.hpp"
#include <troupe/backend.hpp>
#include <troupe/detail/user_call.hpp>
#include <troupe/error.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string_view>
#include <vector>

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

/// Calls `f`, a function of a library, which returns an error or none. Errors of the library keep
/// their codes.
/// @errors errc::launch_failed: an exception, or an error that is not of this library
template <class F> caf::error call_library(F f) noexcept {
  try {
    const caf::error error = f();
    return !error || code_of(error) ? error : make_error(errc::launch_failed, describe(error));
  } catch (...) {
    return make_error(errc::launch_failed,
                      "the library threw: " + exception_text(std::current_exception()));
  }
}

/// Calls `f` on the thread that drives `on`. It finds no CUDA error that other code has left on the
/// thread, and leaves none of its own.
template <class F>
caf::error between_errors(backend_device& on, std::string_view name, std::uint64_t number,
                          F f) noexcept {
  if (auto error = on.clear_last_error("before", name, number))
    return error;
  auto error = f();
  if (auto fault = on.clear_last_error("after", name, number))
    return fault;
  return error;
}

/// As `call_launch`, on the thread that drives `on`.
/// @shape  name: of the launch; number: of its operation, or 0
template <class F>
caf::error call_launch_on(backend_device& on, std::string_view name, std::uint64_t number,
                          F f) noexcept {
  return between_errors(on, name, number, [&] { return call_launch(f); });
}

/// As `call_library`, on the thread that drives `on`.
template <class F>
caf::error call_library_on(backend_device& on, std::string_view name, std::uint64_t number,
                           F f) noexcept {
  return between_errors(on, name, number, [&] { return call_library(f); });
}

/// Marks that a user's callable runs on this thread for the operation `of`. The callable may access
/// the ranges that `of` uses, even if a later operation that uses them failed.
class callable_scope {
public:
  explicit callable_scope(const operation& of) noexcept { runs_ = &of; }
  ~callable_scope() { runs_ = nullptr; }
  callable_scope(const callable_scope&) = delete;
  callable_scope& operator=(const callable_scope&) = delete;

  /// Returns whether a callable runs on this thread whose operation does not use the buffer.
  static bool refuses(const buffer& memory) noexcept {
    return runs_ != nullptr && std::ranges::none_of(runs_->uses(), [&](const use& u) {
             return u.memory.get() == &memory;
           });
  }

  /// Returns whether the operation of this thread's callable uses all of [begin, end).
  static bool covers(const buffer& memory, std::size_t begin, std::size_t end) noexcept {
    return runs_ != nullptr && std::ranges::any_of(runs_->uses(), [&](const use& u) {
             return u.memory.get() == &memory && u.begin <= begin && end <= u.end;
           });
  }

private:
  static inline thread_local const operation* runs_ = nullptr;
};

/// Marks that a host function of a launch runs on this thread, and which buffers the launch uses.
/// The operation may be over by then, and the buffers gone.
class host_function_scope {
public:
  explicit host_function_scope(const std::vector<const buffer*>& used) noexcept { used_ = &used; }
  ~host_function_scope() { used_ = nullptr; }
  host_function_scope(const host_function_scope&) = delete;
  host_function_scope& operator=(const host_function_scope&) = delete;

  /// Returns whether a host function runs on this thread whose launch does not use the buffer.
  static bool refuses(const buffer& memory) noexcept {
    return used_ != nullptr && std::ranges::find(*used_, &memory) == used_->end();
  }

private:
  static inline thread_local const std::vector<const buffer*>* used_ = nullptr;
};

} // namespace troupe::detail
