#include <cstddef>

namespace {

/// Has a thread for each output.
__global__ void dense(const float* w, const float* x, float* y, std::size_t count,
                      std::size_t inputs, std::size_t outputs) {
  const auto at = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= count)
    return;
  float sum = 0;
  for (std::size_t i = 0; i < inputs; ++i)
    sum += w[at % outputs * inputs + i] * x[at / outputs * inputs + i];
  y[at] = fmaxf(sum, 0);
}

} // namespace

cudaError_t launch_dense(const float* w, const float* x, float* y, std::size_t count,
                         std::size_t inputs, std::size_t outputs, cudaStream_t stream) {
  constexpr unsigned threads = 128;
  const auto blocks = static_cast<unsigned>((count + threads - 1) / threads);
  dense<<<blocks, threads, 0, stream>>>(w, x, y, count, inputs, outputs);
  return cudaGetLastError();
}
