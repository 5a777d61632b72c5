/// The common part of troupe/cuda_resource.hpp and troupe/rmm.hpp. The program provides the headers
/// of CUDA and libcu++.
#pragma once

#include <troupe/detail/device_allocator.hpp>

// Before CCCL 3.1, libcu++ has its memory resources only with this.
#ifndef LIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE
#define LIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE
#endif
#include <cuda_runtime_api.h>

#include <cuda/memory_resource>
#include <cuda/stream_ref>

#include <cstddef>
#include <memory>
#include <optional>
#include <utility>

namespace troupe::detail {

/// Returns the stream behind which a lane frees memory; none if this function has waited for it.
/// The default stream of a thread is another stream on the lane's thread.
inline std::optional<CUstream_st*> stream_for_lane(cudaStream_t stream) noexcept {
#if defined(CUDA_API_PER_THREAD_DEFAULT_STREAM) || defined(__CUDA_API_PER_THREAD_DEFAULT_STREAM)
  if (stream == nullptr)
    stream = cudaStreamPerThread;
#endif
  if (stream != cudaStreamPerThread)
    return stream;
  if (const auto code = cudaStreamSynchronize(stream); code != cudaSuccess)
    device_allocator::report_failed_wait(cudaGetErrorName(code));
  return std::nullopt;
}

/// A memory resource over a device. `Failure::raise(const caf::error&)` throws.
template <class Failure> class device_resource {
public:
  static constexpr std::size_t default_alignment = 256;

  /// @errors throws if the device cannot be used: there is none, or it is in another process
  explicit device_resource(device on) {
    auto allocator = device_allocator::make(std::move(on));
    if (!allocator)
      Failure::raise(allocator.error());
    allocator_ = std::move(*allocator);
  }

  const device& where() const noexcept { return allocator_->where(); }

  // -- cuda::mr::resource, from CCCL 3.1 on

  [[nodiscard]] void* allocate_sync(std::size_t size_bytes,
                                    std::size_t alignment = default_alignment) {
    auto memory = allocator_->allocate(size_bytes, alignment);
    if (!memory)
      Failure::raise(memory.error());
    return *memory;
  }
  void deallocate_sync(void* memory, std::size_t, std::size_t = default_alignment) noexcept {
    allocator_->deallocate(memory, std::nullopt);
  }
  [[nodiscard]] void* allocate(cuda::stream_ref, std::size_t size_bytes,
                               std::size_t alignment = default_alignment) {
    return allocate_sync(size_bytes, alignment);
  }
  void deallocate(cuda::stream_ref stream, void* memory, std::size_t,
                  std::size_t = default_alignment) noexcept {
    if (memory != nullptr)
      allocator_->deallocate(memory, stream_for_lane(stream.get()));
  }

  // -- cuda::mr::async_resource, before CCCL 3.1

  [[nodiscard]] void* allocate(std::size_t size_bytes, std::size_t alignment = default_alignment) {
    return allocate_sync(size_bytes, alignment);
  }
  void deallocate(void* memory, std::size_t size_bytes,
                  std::size_t alignment = default_alignment) noexcept {
    deallocate_sync(memory, size_bytes, alignment);
  }
  [[nodiscard]] void* allocate_async(std::size_t size_bytes, std::size_t alignment,
                                     cuda::stream_ref) {
    return allocate_sync(size_bytes, alignment);
  }
  void deallocate_async(void* memory, std::size_t size_bytes, std::size_t alignment,
                        cuda::stream_ref stream) noexcept {
    deallocate(stream, memory, size_bytes, alignment);
  }

  /// Copies are equal: each frees what another one has allocated.
  friend bool operator==(const device_resource&, const device_resource&) = default;
  friend constexpr void get_property(const device_resource&, cuda::mr::device_accessible) noexcept {
  }

private:
  std::shared_ptr<device_allocator> allocator_;
};

} // namespace troupe::detail
