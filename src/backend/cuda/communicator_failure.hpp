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
  return make_error({.code = code,
                     .detail = std::move(detail),
                     .device = where != nullptr ? where->device : -1,
                     .rank = where != nullptr ? where->rank : -1});
}

} // namespace troupe::detail
