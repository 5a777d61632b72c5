/// The owner of one native resource of a device: stream, event, memory, communicator.
#pragma once

#include <utility>

namespace troupe::detail {

/// Owns a value of `Traits`, and remembers its device; empty when default-constructed or moved
/// from.
///
/// `Traits` has a `value_type` that is default-constructible, copyable and comparable; its default
/// value means "none". `static void destroy(value_type, int device) noexcept` handles its errors
/// itself.
template <class Traits> class unique_handle {
public:
  using value_type = typename Traits::value_type;

  unique_handle() noexcept = default;
  unique_handle(value_type value, int device) noexcept : value_(value), device_(device) {}

  unique_handle(const unique_handle&) = delete;
  unique_handle& operator=(const unique_handle&) = delete;

  unique_handle(unique_handle&& other) noexcept
      : value_(std::exchange(other.value_, value_type{})), device_(other.device_) {}

  unique_handle& operator=(unique_handle&& other) noexcept {
    unique_handle(std::move(other)).swap(*this);
    return *this;
  }

  ~unique_handle() { reset(); }

  value_type get() const noexcept { return value_; }
  /// The ordinal of the device that the value belongs to.
  int device() const noexcept { return device_; }
  explicit operator bool() const noexcept { return value_ != value_type{}; }

  /// Releases ownership: the caller must destroy the value.
  [[nodiscard]] value_type release() noexcept { return std::exchange(value_, value_type{}); }

  void reset() noexcept {
    if (*this)
      Traits::destroy(release(), device_);
  }

  void swap(unique_handle& other) noexcept {
    std::swap(value_, other.value_);
    std::swap(device_, other.device_);
  }

private:
  value_type value_{};
  int device_ = -1;
};

} // namespace troupe::detail
