#include "backend/cuda/fill.hpp"

#include <cuda_runtime.h>
#include <nccl.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

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

template <class T> __device__ T product(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using word = std::common_type_t<std::make_unsigned_t<T>, unsigned>;
    return static_cast<T>(static_cast<word>(a) * static_cast<word>(b));
  } else if constexpr (std::is_floating_point_v<T>) {
    return a * b;
  } else {
    return T(static_cast<float>(a) * static_cast<float>(b)); // exact before it is rounded
  }
}

template <class T> __global__ void multiply(T* target, const T* source, T factor, std::size_t n) {
  const std::size_t threads = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n; i += threads)
    target[i] = product(factor, source[i]);
}

/// For a loop of `steps` steps.
cudaLaunchConfig_t grid(std::size_t steps, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim.x = static_cast<unsigned>(
      std::min(most_blocks, std::max<std::size_t>(1, (steps + block_threads - 1) / block_threads)));
  config.blockDim.x = block_threads;
  config.stream = stream;
  return config;
}

template <class T>
cudaError_t launch(void* target, const void* pattern, std::size_t count, cudaStream_t stream) {
  T value{};
  std::memcpy(&value, pattern, sizeof value);
  const auto config = grid(count / (sizeof(uint4) / sizeof(T)), stream);
  return cudaLaunchKernelEx(&config, &fill<T>, static_cast<T*>(target), value, count);
}

/// Calls `f` with a value of the C++ type for `type`.
template <class F> cudaError_t with_type(ncclDataType_t type, F f) {
  switch (type) {
  case ncclInt8:
    return f(std::int8_t{});
  case ncclUint8:
    return f(std::uint8_t{});
  case ncclInt32:
    return f(std::int32_t{});
  case ncclUint32:
    return f(std::uint32_t{});
  case ncclInt64:
    return f(std::int64_t{});
  case ncclUint64:
    return f(std::uint64_t{});
  case ncclFloat16:
    return f(__half{});
  case ncclBfloat16:
    return f(__nv_bfloat16{});
  case ncclFloat32:
    return f(float{});
  case ncclFloat64:
    return f(double{});
  case ncclFloat8e4m3:
    return f(__nv_fp8_e4m3{});
  case ncclFloat8e5m2:
    return f(__nv_fp8_e5m2{});
  default:
    return cudaErrorInvalidValue;
  }
}

cudaError_t load(const void* kernel) {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, kernel);
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

cudaError_t launch_multiply(void* target, const void* source, const void* factor, std::size_t count,
                            ncclDataType_t type, cudaStream_t stream) noexcept {
  return with_type(type, [&](auto value) {
    using T = decltype(value);
    std::memcpy(&value, factor, sizeof value);
    const auto config = grid(count, stream);
    return cudaLaunchKernelEx(&config, &multiply<T>, static_cast<T*>(target),
                              static_cast<const T*>(source), value, count);
  });
}

cudaError_t load_fill() noexcept {
  for (const void* kernel : {reinterpret_cast<const void*>(&fill<std::uint16_t>),
                             reinterpret_cast<const void*>(&fill<std::uint32_t>),
                             reinterpret_cast<const void*>(&fill<std::uint64_t>)})
    if (const cudaError_t code = load(kernel); code != cudaSuccess)
      return code;
  for (int type = 0; type < ncclNumTypes; ++type) {
    const auto code = with_type(static_cast<ncclDataType_t>(type), [](auto value) {
      return load(reinterpret_cast<const void*>(&multiply<decltype(value)>));
    });
    if (code != cudaSuccess)
      return code;
  }
  return cudaSuccess;
}

} // namespace troupe::detail
