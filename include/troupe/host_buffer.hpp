/// Host memory that travels in messages.
#pragma once

#include <troupe/dtype.hpp>
#include <troupe/error.hpp>

#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <vector>

namespace troupe {

/// Shared host memory: copies of the handle refer to the same bytes. Memory that is passed to a
/// request belongs to the request until it completes. The library keeps the memory alive while a
/// device uses it.
class host_buffer {
public:
  host_buffer() = default;

  /// Allocates `size_bytes` of pageable memory, zeroed.
  explicit host_buffer(std::size_t size_bytes);

  /// Takes ownership of a vector's memory.
  template <element T> explicit host_buffer(std::vector<T> elements) {
    auto owner = std::make_shared<std::vector<T>>(std::move(elements));
    size_ = owner->size() * sizeof(T);
    memory_ = {owner, reinterpret_cast<std::byte*>(owner->data())};
  }

  /// Internal: shares ownership of `memory`. `pinned`: devices can read and write it directly.
  host_buffer(std::shared_ptr<std::byte> memory, std::size_t size_bytes, bool pinned)
      : memory_(std::move(memory)), size_(size_bytes), pinned_(pinned) {}

  std::size_t size_bytes() const noexcept { return size_; }
  bool pinned() const noexcept { return pinned_; }
  std::span<const std::byte> bytes() const noexcept { return {memory_.get(), size_}; }
  std::span<std::byte> writable() const noexcept { return {memory_.get(), size_}; }

  /// Returns a part of the buffer, which keeps the whole buffer alive.
  /// @errors errc::out_of_range
  caf::expected<host_buffer> slice(std::size_t offset, std::size_t size_bytes) const;

  /// Returns parts of equal size, in their order. Each keeps the whole buffer alive.
  /// @errors errc::shape_mismatch: the size is no multiple of `parts`, or there are none
  caf::expected<std::vector<host_buffer>> split(std::size_t parts) const;

  /// Returns the bytes as elements, without a remainder that is smaller than one element.
  template <element T> std::span<T> as() const noexcept {
    return {reinterpret_cast<T*>(memory_.get()), size_ / sizeof(T)};
  }

private:
  std::shared_ptr<std::byte> memory_;
  std::size_t size_ = 0;
  bool pinned_ = false;
};

/// Returns a new buffer of pageable memory with the bytes of all parts, in their order.
host_buffer concatenate(std::span<const host_buffer> parts);

/// Serializes the buffer by value.
template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, host_buffer& x) {
  return detail::inspect_as<std::vector<std::uint8_t>>(
      f, x,
      [](const host_buffer& from) {
        std::vector<std::uint8_t> to(from.size_bytes());
        if (!to.empty())
          std::memcpy(to.data(), from.bytes().data(), to.size());
        return to;
      },
      [](const std::vector<std::uint8_t>& from) { return host_buffer{from}; });
}

} // namespace troupe
