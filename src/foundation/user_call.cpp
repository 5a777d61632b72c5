#include "foundation/log.hpp"
#include <troupe/detail/user_call.hpp>

namespace troupe::detail {

std::string exception_text(const std::exception_ptr& x) {
  try {
    std::rethrow_exception(x);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

void log_exception(std::string_view name, const std::exception_ptr& x) noexcept {
  log(log_level::error, std::string{name} + " threw: " + exception_text(x));
}

} // namespace troupe::detail
