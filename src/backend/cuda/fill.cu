#include "backend/cuda/fill.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace troupe::detail {

namespace {

constexpr unsigned block_threads = 256;
constexpr std::size_t most_blocks =
    2048; // enough to fill any device of today; the rest is the loop's

/// The elements before the first 16-byte boundary and after the last one, fewer than a block has
/// threads, are written one by one, all others as vectors. A vector starts at a multiple of the
/// pattern's size, so it always begins with a whole pattern.
template <class T> __global__ void fill(T* target, T value, std::size_t count) {
  constexpr std::size_t per_vector = sizeof(uint4) / sizeof(T);
  union {
    uint4 vector;
    T elements[per_vector];
  } packed;
  for (std::size_t i = 0; i < per_vector; ++i)
    packed.elements[i] = value;
  const std::size_t first = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x;
  const std::size_t threads = std::size_t{gridDim.x} * blockDim.x;
  const std::size_t offset = reinterpret_cast<std::uintptr_t>(target) / sizeof(T) % per_vector;
  const std::size_t to_boundary = (per_vector - offset) % per_vector;
  const std::size_t head = to_boundary < count ? to_boundary : count;
  const std::size_t vectors = (count - head) / per_vector;
  const std::size_t tail = head + vectors * per_vector;
  if (first < head)
    target[first] = value;
  uint4* const aligned = reinterpret_cast<uint4*>(target + head);
  for (std::size_t i = first; i < vectors; i += threads)
    aligned[i] = packed.vector;
  if (tail + first < count)
    target[tail + first] = value;
}

template <class T>
cudaError_t launch(void* target, const void* pattern, std::size_t count, cudaStream_t stream) {
  T value{};
  std::memcpy(&value, pattern, sizeof value);
  const std::size_t vectors = count / (sizeof(uint4) / sizeof(T));
  cudaLaunchConfig_t config{};
  config.gridDim.x = static_cast<unsigned>(std::min(
      most_blocks, std::max<std::size_t>(1, (vectors + block_threads - 1) / block_threads)));
  config.blockDim.x = block_threads;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, &fill<T>, static_cast<T*>(target), value, count);
}

} // namespace

cudaError_t launch_fill(void* target, const void* pattern, std::size_t pattern_bytes,
                        std::size_t count, cudaStream_t stream) noexcept {
  switch (pattern_bytes) {
  case 2:
    return launch<std::uint16_t>(target, pattern, count, stream);
  case 4:
    return launch<std::uint32_t>(target, pattern, count, stream);
  case 8:
    return launch<std::uint64_t>(target, pattern, count, stream);
  default:
    return cudaErrorInvalidValue;
  }
}

cudaError_t load_fill() noexcept {
  const void* const kernels[] = {reinterpret_cast<const void*>(&fill<std::uint16_t>),
                                 reinterpret_cast<const void*>(&fill<std::uint32_t>),
                                 reinterpret_cast<const void*>(&fill<std::uint64_t>)};
  for (const void* kernel : kernels) {
    cudaFuncAttributes attributes{};
    if (const cudaError_t code = cudaFuncGetAttributes(&attributes, kernel); code != cudaSuccess)
      return code;
  }
  return cudaSuccess;
}

} // namespace troupe::detail
