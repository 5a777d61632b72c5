/// Memory that two processes see.
#pragma once

#include "core/file_descriptor.hpp"

#include <cstddef>
#include <span>

namespace troupe::detail {

/// Mapped memory behind a descriptor, which can be passed to another process. It has no name in the
/// file system, only its owner may open it, and its size never changes: a peer that could shrink
/// it, could end this process with SIGBUS.
class shared_memory {
public:
  /// Zeroed.
  /// @errors errc::invalid_argument: no bytes; errc::unavailable: the system refuses it
  static caf::expected<shared_memory> create(std::size_t size_bytes);

  /// What another process has created.
  /// @errors errc::invalid_argument: another size, or one that could change; errc::unavailable: the
  ///         system refuses to map it
  static caf::expected<shared_memory> attach(file_descriptor from, std::size_t size_bytes);

  shared_memory(shared_memory&& other) noexcept
      : descriptor_(std::move(other.descriptor_)), bytes_(std::exchange(other.bytes_, {})) {}
  shared_memory& operator=(shared_memory&& other) noexcept {
    shared_memory taken{std::move(other)};
    std::swap(descriptor_, taken.descriptor_);
    std::swap(bytes_, taken.bytes_);
    return *this;
  }
  ~shared_memory();

  std::span<std::byte> bytes() const noexcept { return bytes_; }
  int descriptor() const noexcept { return descriptor_.get(); }
  /// The memory stays.
  void close_descriptor() noexcept { descriptor_.reset(); }

private:
  static caf::expected<shared_memory> map(file_descriptor from, std::size_t size_bytes);
  shared_memory(file_descriptor descriptor, std::span<std::byte> bytes) noexcept
      : descriptor_(std::move(descriptor)), bytes_(bytes) {}

  file_descriptor descriptor_;
  std::span<std::byte> bytes_;
};

} // namespace troupe::detail
