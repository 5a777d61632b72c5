/// Streams and events of CUDA devices.
#pragma once

#include <troupe/backend.hpp>

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstdint>

namespace troupe::detail {

/// The end of a kernel, as the kernel tells it: sooner than an event of CUDA, and for no call.
struct kernel_end {
  /// In pinned memory that lives as long as the backend; null: there is none.
  const std::atomic<std::uint32_t>* word = nullptr;
  std::uint32_t value = 0; ///< the kernel has ended when the word is at least this, modulo 2^32
  cudaStream_t stream = nullptr; ///< of the kernel

  bool is_over() const noexcept {
    return static_cast<std::int32_t>(word->load(std::memory_order_acquire) - value) >= 0;
  }
};

/// An event of a CUDA device, to which an `event_view` refers.
struct cuda_event {
  cudaEvent_t handle = nullptr; ///< recorded if there is no `end`
  kernel_end end;
  std::chrono::steady_clock::time_point checked{}; ///< when CUDA was asked for a fault before `end`
};

inline cudaStream_t native(stream_view stream) noexcept {
  return static_cast<cudaStream_t>(stream.native);
}

inline cuda_event& as_cuda_event(event_view event) noexcept {
  return *static_cast<cuda_event*>(event.native);
}

} // namespace troupe::detail
