/// The kernel of the benchmark of steps.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace bench {

/// Loads the kernel on the current device.
cudaError_t load_add_one() noexcept;

/// Adds 1 to `count` elements.
cudaError_t launch_add_one(float* x, std::size_t count, cudaStream_t stream) noexcept;

} // namespace bench
