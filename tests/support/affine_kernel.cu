#include "support/affine_kernel.hpp"

#include <cuda_runtime.h>

namespace troupe::testing {

namespace {

__global__ void affine(std::uint32_t* x, const std::uint32_t* y, std::uint32_t a,
                       std::size_t count) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x)
    x[i] = a * x[i] + y[i];
}

} // namespace

int launch_affine(std::uint32_t* x, const std::uint32_t* y, std::uint32_t a, std::size_t count,
                  CUstream_st* stream) noexcept {
  affine<<<64, 256, 0, stream>>>(x, y, a, count);
  return static_cast<int>(cudaGetLastError());
}

} // namespace troupe::testing
