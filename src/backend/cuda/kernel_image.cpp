#include "backend/cuda/kernel_image.hpp"

#include "backend/cuda/cuda_functions.hpp"

#include <cuda.h>

namespace troupe::detail {

namespace {

/// CUDA treats both types as the same.
/// @source CUDA runtime API, "Interactions between CUkernel and cudaKernel_t"
CUkernel native(const kernel& x) noexcept { return reinterpret_cast<CUkernel>(x.handle); }

/// The driver and the runtime have the same numbers for the same errors.
/// @source driver_types.h, cuda.h
cudaError_t as_runtime_error(CUresult code) noexcept { return static_cast<cudaError_t>(code); }

/// Finds a function of the driver through the runtime.
/// @shape since: the first CUDA version with the function in this form
template <class F> cudaError_t driver_function(F& function, const char* name, unsigned since) {
  void* entry = nullptr;
  auto found = cudaDriverEntryPointSymbolNotFound;
  const auto code =
      cudaGetDriverEntryPointByVersion(name, &entry, since, cudaEnableDefault, &found);
  if (code != cudaSuccess)
    return code;
  if (found != cudaDriverEntryPointSuccess)
    return cudaErrorCallRequiresNewerDriver;
  function = reinterpret_cast<F>(entry);
  return cudaSuccess;
}

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
  decltype(&cuKernelGetFunction) get_function = nullptr;
  decltype(&cuFuncLoad) load_function = nullptr;
  auto code = driver_function(get_function, "cuKernelGetFunction", 12000);
  if (code == cudaSuccess)
    code = driver_function(load_function, "cuFuncLoad", 12040);
  for (const auto& x : kernels_) {
    CUfunction function = nullptr; // of the current context
    if (code == cudaSuccess)
      code = as_runtime_error(get_function(&function, native(x)));
    if (code == cudaSuccess)
      code = as_runtime_error(load_function(function));
  }
  return code;
}

cudaError_t launch(const kernel& which, dim3 blocks, unsigned threads, void** arguments,
                   cudaStream_t stream) noexcept {
  return cudaLaunchKernel(which.handle, blocks, dim3{threads}, arguments, 0, stream);
}

} // namespace troupe::detail
