/// Memory of a device for code that knows addresses only (troupe/cuda_resource.hpp,
/// troupe/rmm.hpp).
#pragma once

#include <troupe/device.hpp>

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

struct CUstream_st;

namespace troupe::detail {

class lent_memory;

/// Allocates memory of a device by address. While memory is allocated, the device cannot be reset.
/// @thread any, several at once
class device_allocator {
public:
  /// @errors errc::not_supported: the device is in another process; why there is no device
  static caf::expected<std::shared_ptr<device_allocator>> make(device on);

  explicit device_allocator(device on) : on_(std::move(on)) {}
  /// Gives back what was not deallocated, and logs that.
  ~device_allocator();
  device_allocator(const device_allocator&) = delete;
  device_allocator& operator=(const device_allocator&) = delete;

  const device& where() const noexcept { return on_; }

  /// Returns memory that work of any stream can use at once; null for 0 bytes. Blocks.
  /// @shape  alignment: a power of 2
  /// @errors those of `device::allocate`; errc::invalid_argument: the alignment
  caf::expected<void*> allocate(std::size_t size_bytes, std::size_t alignment);

  /// Frees the memory behind the work that is in `stream` now; none: now. The stream may be
  /// destroyed when this function has returned.
  void deallocate(void* memory, std::optional<CUstream_st*> stream) noexcept;

  /// Logs that the work of a stream, behind which memory is freed, could not be waited for.
  static void report_failed_wait(const char* cuda_error) noexcept;

private:
  const device on_;
  std::mutex mutex_;
  std::unordered_map<void*, std::shared_ptr<lent_memory>> allocated_;
};

} // namespace troupe::detail
