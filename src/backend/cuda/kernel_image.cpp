#include "backend/cuda/kernel_image.hpp"

#include "backend/cuda/cuda_functions.hpp"
#include "backend/cuda/driver_functions.hpp"

#include <cuda.h>

namespace troupe::detail {

cudaError_t kernel_image::find_kernels() noexcept {
  if (library_ != nullptr)
    return cudaSuccess;
  cudaLibrary_t library = nullptr;
  auto code = cudaLibraryLoadData(&library, image_, nullptr, nullptr, 0, nullptr, nullptr, 0);
  for (auto& x : kernels_)
    if (code == cudaSuccess)
      code = cudaLibraryGetKernel(&x.handle, library, x.name);
  if (code == cudaSuccess)
    library_ = library;
  return code;
}

cudaError_t kernel_image::load() noexcept {
  const std::lock_guard lock{mutex_};
  if (const auto code = find_kernels(); code != cudaSuccess)
    return code;
  auto code = cudaSuccess;
  for (const auto& x : kernels_) {
    CUfunction function = nullptr; // of the current context
    if (code == cudaSuccess)
      code = driver::get_function(&function, native(x));
    if (code == cudaSuccess)
      code = driver::load(function);
  }
  return code;
}

cudaError_t launch(const kernel& which, dim3 blocks, unsigned threads, void** arguments,
                   cudaStream_t stream) noexcept {
  // The driver takes the handle of a kernel for that of its function in the current context.
  return driver::launch(reinterpret_cast<CUfunction>(native(which)), blocks.x, blocks.y, blocks.z,
                        threads, 1, 1, 0, stream, arguments, nullptr);
}

} // namespace troupe::detail
