#include "core/system_call.hpp"

#include <system_error>
#include <utility>

namespace troupe::detail {

std::string system_text(int code) { return std::generic_category().message(code); }

caf::error system_failure(const char* api, int code, std::string detail) {
  failure why;
  why.code = errc::unavailable;
  why.detail = std::move(detail);
  why.api = api;
  why.native_code = code;
  why.native_name = system_text(code);
  return make_error(std::move(why));
}

} // namespace troupe::detail
