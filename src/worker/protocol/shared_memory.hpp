/// Memory that two processes share.
#pragma once

#include "foundation/file_descriptor.hpp"

#include <cstddef>
#include <span>

namespace troupe::detail {

/// Mapped memory with a descriptor that can be passed to another process.
/// It has no name in the file system, and only its owner may open it. Its size is sealed: a peer
/// that could shrink it could end this process with SIGBUS.
class shared_memory {
public:
  /// Creates zeroed memory.
  /// @errors errc::invalid_argument: no bytes; errc::unavailable: the system refuses it
  static caf::expected<shared_memory> create(std::size_t size_bytes);

  /// Maps memory that another process has created.
  /// @errors errc::invalid_argument: the size differs, or could change; errc::unavailable: the
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
  /// Closes the descriptor. The memory stays mapped.
  void close_descriptor() noexcept { descriptor_.reset(); }

private:
  static caf::expected<shared_memory> map(file_descriptor from, std::size_t size_bytes);
  shared_memory(file_descriptor descriptor, std::span<std::byte> bytes) noexcept
      : descriptor_(std::move(descriptor)), bytes_(bytes) {}

  file_descriptor descriptor_;
  std::span<std::byte> bytes_;
};

} // namespace troupe::detail
