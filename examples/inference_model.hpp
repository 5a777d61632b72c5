/// The model of the inference service: a dense layer. The .cu file exports a launcher.
#pragma once

#if TROUPE_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

#include <algorithm>
#include <cstddef>

constexpr std::size_t model_inputs = 256;
constexpr std::size_t model_outputs = 64;

/// Computes y[k][o] = max(0, sum over i of w[o][i] * x[k][i]) for `count` rows of x.
inline void dense_on_host(const float* w, const float* x, float* y, std::size_t count) {
  for (std::size_t at = 0; at < count * model_outputs; ++at) {
    const auto* weights = w + at % model_outputs * model_inputs;
    const auto* row = x + at / model_outputs * model_inputs;
    float sum = 0;
    for (std::size_t i = 0; i < model_inputs; ++i)
      sum += weights[i] * row[i];
    y[at] = std::max(sum, 0.0f);
  }
}

#if TROUPE_HAS_CUDA
/// Enqueues the same.
cudaError_t launch_dense(const float* w, const float* x, float* y, std::size_t count,
                         cudaStream_t stream);
#endif
