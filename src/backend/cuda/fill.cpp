#include "backend/cuda/fill.hpp"

#include "backend/cuda/fill_kernels.hpp"
#include "backend/cuda/kernel_image.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>

/// The code of fill.cu, compiled by nvcc.
extern "C" const unsigned char troupe_fill_image[];

namespace troupe::detail {

namespace {

#define TROUPE_FILL_NAME(bytes) {"fill_" #bytes},
#define TROUPE_MULTIPLY_NAME(name, nccl_type, type) {"multiply_" #name},
constinit kernel kernels[] = {TROUPE_FILL_KERNELS(TROUPE_FILL_NAME)
                                  TROUPE_MULTIPLY_KERNELS(TROUPE_MULTIPLY_NAME){"write_words"}};

const kernel& word_writer = *std::prev(std::end(kernels));

#define TROUPE_FILL_BYTES(bytes) bytes,
constexpr std::size_t fill_bytes[] = {TROUPE_FILL_KERNELS(TROUPE_FILL_BYTES)};

#define TROUPE_MULTIPLY_TYPE(name, nccl_type, type) nccl_type,
constexpr ncclDataType_t multiply_types[] = {TROUPE_MULTIPLY_KERNELS(TROUPE_MULTIPLY_TYPE)};

constinit kernel_image image{troupe_fill_image, kernels};

constexpr unsigned block_threads = 256;
/// Enough to fill any current device; the kernels loop over the rest.
constexpr std::size_t most_blocks = 2048;
constexpr std::size_t vector_bytes = 16; ///< written at once by a thread of `fill`
constexpr std::size_t widest_element = 16;

/// Returns the number of blocks for a loop of `steps` steps.
unsigned blocks_for(std::size_t steps) noexcept {
  return static_cast<unsigned>(
      std::min(most_blocks, std::max<std::size_t>(1, (steps + block_threads - 1) / block_threads)));
}

/// A kernel argument with the type of an element.
struct element {
  element(const void* from, std::size_t size) noexcept { std::memcpy(bytes, from, size); }
  alignas(widest_element) unsigned char bytes[widest_element] = {};
};

std::size_t size_of(ncclDataType_t type) noexcept {
  switch (type) {
  case ncclInt8:
  case ncclUint8:
  case ncclFloat8e4m3:
  case ncclFloat8e5m2:
    return 1;
  case ncclFloat16:
  case ncclBfloat16:
    return 2;
  case ncclInt32:
  case ncclUint32:
  case ncclFloat32:
    return 4;
  default:
    return 8;
  }
}

} // namespace

cudaError_t launch_fill(void* target, const void* pattern, std::size_t pattern_bytes,
                        std::size_t count, cudaStream_t stream) noexcept {
  const auto* const found = std::ranges::find(fill_bytes, pattern_bytes);
  if (found == std::end(fill_bytes))
    return cudaErrorInvalidValue;
  element value{pattern, pattern_bytes};
  void* arguments[] = {&target, value.bytes, &count};
  return launch(kernels[found - std::begin(fill_bytes)],
                dim3{blocks_for(count / (vector_bytes / pattern_bytes))}, block_threads, arguments,
                stream);
}

cudaError_t launch_multiply(void* target, const void* source, const void* factor, std::size_t count,
                            ncclDataType_t type, cudaStream_t stream) noexcept {
  const auto* const found = std::ranges::find(multiply_types, type);
  if (found == std::end(multiply_types))
    return cudaErrorInvalidValue;
  element value{factor, size_of(type)};
  void* arguments[] = {&target, &source, value.bytes, &count};
  return launch(
      kernels[std::size(fill_bytes) + static_cast<std::size_t>(found - std::begin(multiply_types))],
      dim3{blocks_for(count)}, block_threads, arguments, stream);
}

cudaError_t launch_write_words(std::uint64_t* target, std::span<const std::uint64_t> words,
                               cudaStream_t stream) noexcept {
  while (!words.empty()) {
    const auto some = words.first(std::min<std::size_t>(words.size(), TROUPE_WORDS_AT_ONCE));
    std::uint64_t list[TROUPE_WORDS_AT_ONCE] = {};
    std::ranges::copy(some, list);
    auto count = static_cast<unsigned>(some.size());
    void* arguments[] = {&target, list, &count};
    if (const auto code =
            launch(word_writer, dim3{blocks_for(count)}, block_threads, arguments, stream);
        code != cudaSuccess)
      return code;
    words = words.subspan(some.size());
    target += some.size();
  }
  return cudaSuccess;
}

cudaError_t load_fill() noexcept { return image.load(); }

} // namespace troupe::detail
