#include "step/step_kernels.hpp"

#include <cuda_runtime.h>

#include <cstddef>

namespace troupe::testing {

namespace {

__global__ void map_affine(std::uint32_t* to, const std::uint32_t* from, std::uint32_t factor,
                           std::uint32_t term, std::size_t count) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x)
    to[i] = factor * from[i] + term;
}

__device__ std::uint64_t now() {
  std::uint64_t x;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(x));
  return x;
}

__global__ void spin(std::uint64_t nanoseconds) {
  const auto begin = now();
  while (now() - begin < nanoseconds) {
  }
}

__global__ void spin_for(const std::uint32_t* us) {
  const auto begin = now();
  while (now() - begin < std::uint64_t{*us} * 1000) {
  }
}

} // namespace

cudaError_t load_step_kernels() noexcept {
  cudaFuncAttributes unused{};
  if (const auto code = cudaFuncGetAttributes(&unused, map_affine); code != cudaSuccess)
    return code;
  if (const auto code = cudaFuncGetAttributes(&unused, spin); code != cudaSuccess)
    return code;
  return cudaFuncGetAttributes(&unused, spin_for);
}

cudaError_t launch_step_affine(std::span<std::uint32_t> to, std::span<const std::uint32_t> from,
                               std::uint32_t factor, std::uint32_t term,
                               cudaStream_t stream) noexcept {
  map_affine<<<4, 256, 0, stream>>>(to.data(), from.data(), factor, term, to.size());
  return cudaGetLastError();
}

cudaError_t launch_step_delay(std::chrono::nanoseconds time, cudaStream_t stream) noexcept {
  spin<<<1, 1, 0, stream>>>(static_cast<std::uint64_t>(time.count()));
  return cudaGetLastError();
}

cudaError_t launch_step_wait(const std::uint32_t* us, cudaStream_t stream) noexcept {
  spin_for<<<1, 1, 0, stream>>>(us);
  return cudaGetLastError();
}

} // namespace troupe::testing
