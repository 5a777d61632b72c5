/// Kernels that corrupt a context, and kernels that are not yet loaded.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace troupe::testing {

enum class kernel_fault : std::uint8_t { illegal_address, trap, assertion };

inline constexpr std::array all_kernel_faults{kernel_fault::illegal_address, kernel_fault::trap,
                                              kernel_fault::assertion};

/// Returns true if CUDA may return this cudaError_t after the fault.
bool may_give(kernel_fault what, int native_code) noexcept;

/// Launches a kernel with this fault. Returns a cudaError_t.
int launch_faulty(kernel_fault what, CUstream_st* stream) noexcept;

/// Number of kernels that `launch_fresh` has.
inline constexpr std::size_t fresh_kernels = 32;

/// Launches x[i] += which + 1, with a separate kernel for each `which`. CUDA loads a kernel at its
/// first launch, unless CUDA_MODULE_LOADING=EAGER is in the environment. Returns a cudaError_t.
/// @shape x: `count` elements in device memory; which < `fresh_kernels`
int launch_fresh(std::size_t which, std::uint32_t* x, std::size_t count,
                 CUstream_st* stream) noexcept;

} // namespace troupe::testing
