/// Calls of functions that users pass in. An exception becomes an error value, or a log line if
/// there is no caller that could receive an error.
#pragma once

#include <troupe/error.hpp>

#include <exception>
#include <string>
#include <string_view>
#include <type_traits>

namespace troupe::detail {

/// Returns the text of an exception.
std::string exception_text(const std::exception_ptr& x);

/// Calls `f`, which returns an error or nothing. `name` describes `f` in the error text.
/// @errors `code`: `f` threw; the text contains `name` and the text of the exception
template <class F> caf::error call_user(errc code, std::string_view name, F&& f) noexcept {
  try {
    if constexpr (std::is_void_v<std::invoke_result_t<F&>>) {
      f();
      return {};
    } else {
      return f();
    }
  } catch (...) {
    return make_error(code,
                      std::string{name} + " threw: " + exception_text(std::current_exception()));
  }
}

/// Logs that the function called `name` threw `x`.
void log_exception(std::string_view name, const std::exception_ptr& x) noexcept;

/// Calls `f` and logs an exception that it throws.
template <class F> void call_user_or_log(std::string_view name, F&& f) noexcept {
  try {
    f();
  } catch (...) {
    log_exception(name, std::current_exception());
  }
}

} // namespace troupe::detail
