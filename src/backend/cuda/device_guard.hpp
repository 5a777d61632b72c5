/// The calling thread's current device.
#pragma once

#include "backend/cuda/cuda_functions.hpp"

#include <cuda_runtime_api.h>

namespace troupe::detail {

/// Makes `device` the current device of the calling thread, which is a library thread: a lane, a
/// builder, a reaper. Asks CUDA each time, since a user's launch callable may have changed the
/// device.
inline cudaError_t select_device(int device) noexcept {
  int current = -1;
  if (cudaGetDevice(&current) == cudaSuccess && current == device)
    return cudaSuccess;
  return cudaSetDevice(device);
}

/// Makes `device` current for a scope on any thread, then restores the previous device.
class device_guard {
public:
  explicit device_guard(int device) noexcept {
    error_ = cudaGetDevice(&before_);
    if (error_ == cudaSuccess && before_ != device) {
      error_ = cudaSetDevice(device);
      changed_ = error_ == cudaSuccess;
    }
  }

  ~device_guard() {
    if (changed_)
      (void)cudaSetDevice(
          before_); // it was current before: only a fault reported elsewhere makes this fail
  }

  device_guard(const device_guard&) = delete;
  device_guard& operator=(const device_guard&) = delete;

  /// cudaSuccess when `device` is the current one.
  cudaError_t error() const noexcept { return error_; }

private:
  int before_ = 0;
  cudaError_t error_ = cudaSuccess;
  bool changed_ = false;
};

} // namespace troupe::detail
