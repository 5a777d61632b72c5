/// Errors of the worker's service.
#pragma once

#include <troupe/error.hpp>

#include <string>

namespace troupe::detail {

inline caf::error malformed() { return make_error(errc::internal, "a command could not be read"); }

inline caf::error no_such(const char* what) {
  return make_error(errc::internal, std::string{"the worker has no such "} + what);
}

} // namespace troupe::detail
