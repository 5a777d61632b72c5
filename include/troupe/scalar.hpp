/// One element of any type.
#pragma once

#include <troupe/dtype.hpp>
#include <troupe/error.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace troupe {

/// One element and its type: `troupe::scalar x = 1.0f`.
class scalar {
public:
  /// No element.
  scalar() = default;

  template <element T> scalar(T x) noexcept : type_(dtype_v<T>) {
    std::memcpy(&content_, &x, sizeof x);
  }

  /// Returns the element of that type with these bytes.
  /// @errors errc::shape_mismatch: not the size of one element; errc::invalid_argument: there is no
  ///         such type
  static caf::expected<scalar> from_bytes(dtype type, std::span<const std::byte> bytes);

  /// Returns whether there is an element.
  explicit operator bool() const noexcept { return is_dtype(type_); }
  /// Returns the type; no enumerator without an element.
  dtype type() const noexcept { return type_; }
  /// Returns the element as it lies in memory; nothing without an element.
  std::span<const std::byte> bytes() const& noexcept {
    return std::as_bytes(std::span{content_}).first(size_of(type_));
  }
  std::span<const std::byte> bytes() const&& = delete; // they would be gone

  friend bool operator==(const scalar&, const scalar&) = default;

  template <class Inspector>
  friend detail::inspect_result<Inspector> inspect(Inspector& f, scalar& x) {
    using detail::field;
    return detail::fields(f, x, "troupe::scalar", field("type", x.type_),
                          field("first", x.content_[0]), field("second", x.content_[1]));
  }

private:
  dtype type_ = static_cast<dtype>(UINT8_MAX);
  std::array<std::uint64_t, 2> content_{}; // the bytes behind those of the element are 0
};

} // namespace troupe
