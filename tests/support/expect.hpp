/// Errors and expected values in tests.
#pragma once

#include <troupe/error.hpp>

#include <gtest/gtest.h>

#include <stdexcept>
#include <utility>

namespace troupe::testing {

inline ::testing::AssertionResult is_ok(const caf::error& e) {
  if (!e)
    return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << describe(e);
}

/// For EXPECT_TRUE: `e` is an error of the library with this code.
inline ::testing::AssertionResult has_code(const caf::error& e, errc code) {
  if (code_of(e) == code)
    return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "wanted " << to_string(code) << ", got " << (e ? describe(e) : "no error");
}

template <class T>::testing::AssertionResult has_code(const caf::expected<T>& x, errc code) {
  return has_code(x ? caf::error{} : x.error(), code);
}

/// Returns the value. Without a value the test fails here.
template <class T> T must(caf::expected<T> x) {
  if (!x)
    throw std::runtime_error(describe(x.error()));
  return std::move(*x);
}

inline void must(const caf::expected<void>& x) {
  if (!x)
    throw std::runtime_error(describe(x.error()));
}

inline void must(const caf::error& e) {
  if (e)
    throw std::runtime_error(describe(e));
}

} // namespace troupe::testing
