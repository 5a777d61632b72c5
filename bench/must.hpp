/// Unwraps results; an error ends the benchmark.
#pragma once

#include "contestant.hpp"
#include <troupe/error.hpp>

#include <caf/error.hpp>
#include <caf/expected.hpp>

#include <type_traits>
#include <utility>

namespace bench {

template <class T> T must(caf::expected<T>&& x) {
  if (!x)
    fail(troupe::describe(x.error()));
  if constexpr (!std::is_void_v<T>)
    return std::move(*x);
}

inline void must(const caf::error& x) {
  if (x)
    fail(troupe::describe(x));
}

} // namespace bench
