/// Calls of functions that users hand in. An exception becomes an error value, or a line of the
/// log where there is nobody to get one.
#pragma once

#include <troupe/error.hpp>

#include <exception>
#include <string>
#include <string_view>
#include <type_traits>

namespace troupe::detail {

/// Returns the text of an exception.
std::string exception_text(const std::exception_ptr& x);

/// Calls `f`, which returns an error or nothing. `name` says what `f` is.
/// @errors `code`: it threw; the text names it and the exception
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

/// Logs that the function of that name threw `x`.
void log_exception(std::string_view name, const std::exception_ptr& x) noexcept;

/// Calls `f`, whose exception is a line of the log.
template <class F> void call_user_or_log(std::string_view name, F&& f) noexcept {
  try {
    f();
  } catch (...) {
    log_exception(name, std::current_exception());
  }
}

} // namespace troupe::detail
