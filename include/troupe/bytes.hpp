/// Values as bytes: for the arguments of launches and programs, and for what programs report.
#pragma once

#include <troupe/error.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace troupe {

namespace detail {

/// A type whose bytes are its value: no pointer, and no span or view, which have pointers.
template <class T>
concept plain_value = std::is_trivially_copyable_v<T> && !std::is_pointer_v<T> && !requires {
  typename T::element_type;
} && !requires { typename T::traits_type; };

} // namespace detail

/// Returns the bytes of a value, for `from_bytes` in a process of the same program.
template <detail::plain_value T> std::vector<std::uint8_t> to_bytes(const T& value) {
  std::vector<std::uint8_t> result(sizeof(T));
  std::memcpy(result.data(), &value, sizeof(T));
  return result;
}

/// Returns the value whose bytes these are.
/// @errors errc::shape_mismatch: another number of bytes than a `T` has
template <detail::plain_value T>
  requires std::is_default_constructible_v<T>
caf::expected<T> from_bytes(std::span<const std::byte> bytes) {
  if (bytes.size() != sizeof(T))
    return make_error(errc::shape_mismatch, std::to_string(bytes.size()) +
                                                " bytes are not a value of " +
                                                std::to_string(sizeof(T)));
  T result;
  std::memcpy(&result, bytes.data(), sizeof(T));
  return result;
}

template <detail::plain_value T>
caf::expected<T> from_bytes(const std::vector<std::uint8_t>& bytes) {
  return from_bytes<T>(std::as_bytes(std::span{bytes}));
}

} // namespace troupe
