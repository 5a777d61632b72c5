/// The calling thread's current device.
#pragma once

#include "backend/cuda/cuda_error.hpp"
#include "backend/cuda/cuda_functions.hpp"
#include "backend/cuda/driver_functions.hpp"

#include <cuda.h>
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

/// Makes `device` current for a scope on any thread, then restores what was current before: also a
/// context of the user's own, or none. A restored device would get a context, which takes memory.
class device_guard {
public:
  explicit device_guard(int device) noexcept {
    if (!is_current(device))
      error_ = push(device);
  }

  ~device_guard() {
    if (!pushed_)
      return;
    CUcontext context = nullptr;
    (void)driver::pop_context(&context); // fails only after a fault, which is reported elsewhere
    (void)driver::release_context(device_);
  }

  device_guard(const device_guard&) = delete;
  device_guard& operator=(const device_guard&) = delete;

  /// cudaSuccess when `device` is the current one, with its context.
  cudaError_t error() const noexcept { return error_; }

private:
  static bool is_current(int device) noexcept {
    CUcontext context = nullptr;
    int current = -1;
    return driver::get_context(&context) == cudaSuccess && context != nullptr &&
           cudaGetDevice(&current) == cudaSuccess && current == device;
  }

  cudaError_t push(int device) noexcept {
    CUcontext context = nullptr;
    if (const auto code = driver::get_device(&device_, device); code != cudaSuccess)
      return code;
    if (const auto code = driver::retain_context(&context, device_); code != cudaSuccess)
      return code;
    const auto code = driver::push_context(context);
    pushed_ = code == cudaSuccess;
    if (!pushed_)
      (void)driver::release_context(device_);
    return code;
  }

  CUdevice device_ = 0;
  cudaError_t error_ = cudaSuccess;
  bool pushed_ = false;
};

/// Calls `f`, which makes the CUDA call `api`, with `device` as the current one of any thread.
template <class F> caf::error call_with(int device, const char* api, F f) noexcept {
  const device_guard guard{device};
  if (auto err = check(guard.error(), "cuCtxPushCurrent", device))
    return err;
  return check(f(), api, device);
}

} // namespace troupe::detail
