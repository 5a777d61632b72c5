/// Errors of communicators that the library finds itself.
#pragma once

#include <troupe/backend.hpp>
#include <troupe/error.hpp>

#include <string>
#include <utility>

namespace troupe::detail {

/// @param where the rank that failed, or null
inline caf::error communicator_failure(errc code, std::string detail,
                                       const local_rank* where = nullptr) {
  failure x;
  x.code = code;
  x.detail = std::move(detail);
  if (where != nullptr) {
    x.rank = where->rank;
    x.device = where->device;
  }
  return make_error(std::move(x));
}

inline caf::error build_called_off() {
  return communicator_failure(errc::unavailable, "the build of the communicator was called off");
}

} // namespace troupe::detail
