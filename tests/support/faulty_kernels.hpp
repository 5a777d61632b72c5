/// Kernels that end a context, and kernels that nothing has loaded before.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace troupe::testing {

enum class kernel_fault : std::uint8_t { illegal_address, trap, assertion };

inline constexpr std::array all_kernel_faults{kernel_fault::illegal_address, kernel_fault::trap,
                                              kernel_fault::assertion};

/// Whether CUDA may give this cudaError_t for it from then on.
bool may_give(kernel_fault what, int native_code) noexcept;

/// Launches a kernel that fails so; gives a cudaError_t.
int launch_faulty(kernel_fault what, CUstream_st* stream) noexcept;

/// How many kernels `launch_fresh` has.
inline constexpr std::size_t fresh_kernels = 32;

/// x[i] += which + 1, by a kernel of its own for each `which`: CUDA loads it at its first launch,
/// unless CUDA_MODULE_LOADING=EAGER is in the environment. Gives a cudaError_t.
/// @shape x: `count` elements in device memory; which < `fresh_kernels`
int launch_fresh(std::size_t which, std::uint32_t* x, std::size_t count,
                 CUstream_st* stream) noexcept;

} // namespace troupe::testing
