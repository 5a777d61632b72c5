#include "train.hpp"

template <class F> __global__ void call(F f, std::size_t calls) {
  if (const auto at = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; at < calls)
    f(at);
}

template <class F> cudaError_t launch(const F& f, std::size_t calls, cudaStream_t stream) {
  constexpr unsigned threads = 128;
  call<<<static_cast<unsigned>((calls + threads - 1) / threads), threads, 0, stream>>>(f, calls);
  return cudaGetLastError();
}

template cudaError_t launch(const point_errors&, std::size_t, cudaStream_t);
template cudaError_t launch(const update&, std::size_t, cudaStream_t);
