/// The kernels of the launches for tests of steps.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <span>

namespace troupe::testing {

/// Loads the kernels on the current device. CUDA may wait for all work of the device at a kernel's
/// first launch.
cudaError_t load_step_kernels() noexcept;

/// Launches to[i] = factor * from[i] + term, modulo 2^32.
/// @shape from, to: device memory of the same length
cudaError_t launch_step_affine(std::span<std::uint32_t> to, std::span<const std::uint32_t> from,
                               std::uint32_t factor, std::uint32_t term,
                               cudaStream_t stream) noexcept;

/// Launches a kernel that runs for at least `time`.
cudaError_t launch_step_delay(std::chrono::nanoseconds time, cudaStream_t stream) noexcept;

/// Launches a kernel that runs for at least the microseconds that it reads.
/// @shape us: one element in device memory
cudaError_t launch_step_wait(const std::uint32_t* us, cudaStream_t stream) noexcept;

} // namespace troupe::testing
