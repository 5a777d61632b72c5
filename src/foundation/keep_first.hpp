/// The first error of several calls that are all made.
#pragma once

#include <troupe/error.hpp>

#include <utility>

namespace troupe::detail {

/// Sets `first` to `next`, unless it is an error already.
inline void keep_first(caf::error& first, caf::error next) noexcept {
  if (next && !first)
    first = std::move(next);
}

} // namespace troupe::detail
