/// The heat equation on a grid, for the kernel and for the host.
#pragma once

#if TROUPE_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

#include <cstddef>

#ifdef __CUDACC__
#define HEAT_ON_HOST_AND_DEVICE __host__ __device__
#else
#define HEAT_ON_HOST_AND_DEVICE
#endif

/// Returns the temperature of a place after one time step. The factors are powers of two, so their
/// products are exact, and the result has the same bits with and without fused multiply-add.
HEAT_ON_HOST_AND_DEVICE inline float next_temperature(float here, float above, float below,
                                                      float left, float right) {
  return 0.5f * here + 0.125f * ((above + below) + (left + right));
}

/// Computes one time step of `rows` rows. `now` has one row more above them and one below. The
/// first and the last place of each row keep their temperatures.
inline void heat_on_host(const float* now, float* next, std::size_t rows, std::size_t columns) {
  for (std::size_t row = 0; row < rows; ++row) {
    const auto* here = now + (row + 1) * columns;
    const auto* above = here - columns;
    const auto* below = here + columns;
    auto* to = next + row * columns;
    to[0] = here[0];
    to[columns - 1] = here[columns - 1];
    for (std::size_t x = 1; x + 1 < columns; ++x)
      to[x] = next_temperature(here[x], above[x], below[x], here[x - 1], here[x + 1]);
  }
}

#if TROUPE_HAS_CUDA
/// Enqueues the same.
cudaError_t launch_heat(const float* now, float* next, std::size_t rows, std::size_t columns,
                        cudaStream_t stream);
#endif
