/// The library's kernels: some that fill memory with a pattern or with words, and one that
/// multiplies.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace troupe::detail {

/// Writes `pattern` `count` times to `target`, in the order of `stream`.
/// @shape pattern: 2, 4, 8 or 16 bytes, else cudaErrorInvalidValue; target: aligned to that size
cudaError_t launch_fill(void* target, const void* pattern, std::size_t pattern_bytes,
                        std::size_t count, cudaStream_t stream) noexcept;

/// Computes target[i] = factor * source[i] as NCCL multiplies in a reduction: integers wrap, narrow
/// floating-point numbers are rounded once, float8 saturates.
/// @shape factor: one element in host memory, not used after the call; source may equal target;
///        cudaErrorInvalidValue for an unknown type
cudaError_t launch_multiply(void* target, const void* source, const void* factor, std::size_t count,
                            ncclDataType_t type, cudaStream_t stream) noexcept;

/// Writes `words` to device memory, in the order of `stream`.
/// @shape words: in host memory, not used after the call
cudaError_t launch_write_words(std::uint64_t* target, std::span<const std::uint64_t> words,
                               cudaStream_t stream) noexcept;

/// Loads the kernels on the current device (`kernel_image::load`).
cudaError_t load_fill() noexcept;

} // namespace troupe::detail
