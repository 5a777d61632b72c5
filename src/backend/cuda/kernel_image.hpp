/// The library's kernels: device code that is compiled separately (`troupe_embed_kernels` in
/// cmake/TroupeKernels.cmake) and loaded at run time, so that the library links without CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>
#include <span>

namespace troupe::detail {

/// A kernel that is `extern "C"` in its image.
struct kernel {
  const char* name;
  cudaKernel_t handle = nullptr; ///< for all devices; null until the image is loaded
};

/// The device code of one .cu file, for all architectures, and its kernels.
class kernel_image {
public:
  /// @shape image: a fatbin that lives as long as the process; kernels: live as long as this object
  constexpr kernel_image(const unsigned char* image, std::span<kernel> kernels) noexcept
      : image_(image), kernels_(kernels) {}

  kernel_image(const kernel_image&) = delete;
  kernel_image& operator=(const kernel_image&) = delete;

  /// Loads the code of all kernels on the current device. Otherwise the first launch of each kernel
  /// loads it, and may wait for all work on the device.
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

/// Launches a kernel on the current device.
/// @shape arguments: the address of each argument, of exactly the type of the kernel's parameter
cudaError_t launch(const kernel& which, dim3 blocks, unsigned threads, void** arguments,
                   cudaStream_t stream) noexcept;

/// The same, for a kernel that begins with `griddepcontrol.wait`: it may be started before the
/// former work of the stream is over, and waits for that itself. Takes 0.6 us less.
/// @source CUDA programming guide, "Programmatic Dependent Launch"
cudaError_t launch_early(const kernel& which, dim3 blocks, unsigned threads, void** arguments,
                         cudaStream_t stream) noexcept;

/// Returns the architecture for which the kernel's code on `device` was compiled: 90 is 9.0.
cudaError_t compiled_for(int& architecture, const kernel& which, int device) noexcept;

} // namespace troupe::detail
