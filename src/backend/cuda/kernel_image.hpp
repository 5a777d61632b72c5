/// The library's kernels: device code that is compiled apart (`troupe_embed_kernels` in
/// cmake/TroupeKernels.cmake) and loaded at run time, so that the library needs no CUDA to link.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>
#include <span>

namespace troupe::detail {

/// A kernel that its image has as `extern "C"`.
struct kernel {
  const char* name;
  cudaKernel_t handle = nullptr; ///< of all devices; null until its image is loaded
};

/// The device code of one .cu file, for all architectures, and its kernels.
class kernel_image {
public:
  /// @shape image: a fatbin, which lives as long as the process; kernels: as long as this object
  constexpr kernel_image(const unsigned char* image, std::span<kernel> kernels) noexcept
      : image_(image), kernels_(kernels) {}

  kernel_image(const kernel_image&) = delete;
  kernel_image& operator=(const kernel_image&) = delete;

  /// Loads the code of all kernels on the current device. Without it the first launch of each would
  /// do so, and might wait for all work on the device.
  /// @thread any, before launches of that thread
  /// @source CUDA C++ programming guide, "Lazy Loading"; driver API, `cuFuncLoad`
  cudaError_t load() noexcept;

private:
  cudaError_t find_kernels() noexcept;

  const unsigned char* const image_;
  const std::span<kernel> kernels_;
  std::mutex mutex_;
  cudaLibrary_t library_ = nullptr; ///< never unloaded
};

/// Runs a kernel on the current device.
/// @shape arguments: the address of each, of exactly the type that the kernel has for it
cudaError_t launch(const kernel& which, unsigned blocks, unsigned threads, void** arguments,
                   cudaStream_t stream) noexcept;

} // namespace troupe::detail
