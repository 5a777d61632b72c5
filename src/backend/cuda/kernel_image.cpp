#include "backend/cuda/kernel_image.hpp"

#include "backend/cuda/cuda_functions.hpp"
#include "backend/cuda/driver_functions.hpp"

#include <cuda.h>

namespace troupe::detail {

namespace {

/// CUDA treats both types as the same.
/// @source CUDA runtime API, "Interactions between CUkernel and cudaKernel_t"
CUkernel native(const kernel& x) noexcept { return reinterpret_cast<CUkernel>(x.handle); }

/// The driver takes the handle of a kernel for that of its function in the current context.
CUfunction function_of(const kernel& x) noexcept { return reinterpret_cast<CUfunction>(native(x)); }

} // namespace

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
  return driver::launch(function_of(which), blocks.x, blocks.y, blocks.z, threads, 1, 1, 0, stream,
                        arguments, nullptr);
}

cudaError_t launch_early(const kernel& which, dim3 blocks, unsigned threads, void** arguments,
                         cudaStream_t stream) noexcept {
  CUlaunchAttribute early{};
  early.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  early.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig how{};
  how.gridDimX = blocks.x;
  how.gridDimY = blocks.y;
  how.gridDimZ = blocks.z;
  how.blockDimX = threads;
  how.blockDimY = 1;
  how.blockDimZ = 1;
  how.hStream = stream;
  how.attrs = &early;
  how.numAttrs = 1;
  return driver::launch_with(&how, function_of(which), arguments, nullptr);
}

cudaError_t compiled_for(int& architecture, const kernel& which, int device) noexcept {
  return driver::get_attribute(&architecture, CU_FUNC_ATTRIBUTE_PTX_VERSION, native(which), device);
}

} // namespace troupe::detail
