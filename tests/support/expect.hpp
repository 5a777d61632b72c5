/// Errors and expected values in tests.
#pragma once

#include <troupe/error.hpp>
#include <troupe/gpu_ref.hpp>
#include <troupe/scalar.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

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

/// Returns an element of the buffer's type whose bytes are all the same.
inline scalar same_bytes(const any_gpu_ref& ref, std::uint8_t byte = 0) {
  const std::vector<std::byte> bytes(size_of(ref.type()), std::byte{byte});
  return must(scalar::from_bytes(ref.type(), bytes));
}

} // namespace troupe::testing
