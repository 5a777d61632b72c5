#include "inference_model.hpp"

namespace {

__global__ void dense(const float* w, const float* x, float* y, std::size_t count) {
  const auto at = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= count * model_outputs)
    return;
  const auto* weights = w + at % model_outputs * model_inputs;
  const auto* row = x + at / model_outputs * model_inputs;
  float sum = 0;
  for (std::size_t i = 0; i < model_inputs; ++i)
    sum += weights[i] * row[i];
  y[at] = fmaxf(sum, 0);
}

} // namespace

cudaError_t launch_dense(const float* w, const float* x, float* y, std::size_t count,
                         cudaStream_t stream) {
  constexpr std::size_t threads = 128;
  const auto blocks = (count * model_outputs + threads - 1) / threads;
  dense<<<static_cast<unsigned>(blocks), threads, 0, stream>>>(w, x, y, count);
  return cudaGetLastError();
}
