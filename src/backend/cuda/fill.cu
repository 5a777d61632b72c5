// Device code only: fill.cpp launches it.

#include "backend/cuda/fill_kernels.hpp"

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

namespace {

/// Writes the elements before the first 16-byte boundary and after the last one singly (fewer than
/// a block has threads), all others as vectors. A vector starts at a multiple of the pattern's
/// size, so it begins with a whole pattern.
template <class T> __device__ void fill(T* target, T value, std::size_t count) {
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

template <class T> __device__ void multiply(T* target, const T* source, T factor, std::size_t n) {
  const std::size_t threads = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n; i += threads)
    target[i] = product(factor, source[i]);
}

template <std::size_t Bytes> struct word;
template <> struct word<2> {
  using type = std::uint16_t;
};
template <> struct word<4> {
  using type = std::uint32_t;
};
template <> struct word<8> {
  using type = std::uint64_t;
};
template <> struct word<16> {
  using type = uint4;
};

struct word_list {
  std::uint64_t words[TROUPE_WORDS_AT_ONCE];
};

} // namespace

extern "C" __global__ void write_words(std::uint64_t* target, const word_list list,
                                       unsigned count) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count)
    target[i] = list.words[i];
}

#define TROUPE_FILL(bytes)                                                                         \
  extern "C" __global__ void fill_##bytes(word<bytes>::type* target, word<bytes>::type value,      \
                                          std::size_t count) {                                     \
    fill(target, value, count);                                                                    \
  }
TROUPE_FILL_KERNELS(TROUPE_FILL)

#define TROUPE_MULTIPLY(name, nccl_type, type)                                                     \
  extern "C" __global__ void multiply_##name(type* target, const type* source, type factor,        \
                                             std::size_t count) {                                  \
    multiply(target, source, factor, count);                                                       \
  }
TROUPE_MULTIPLY_KERNELS(TROUPE_MULTIPLY)
