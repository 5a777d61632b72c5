#include "train.hpp"

template <class F> __global__ void call(F f) { f(threadIdx.x); }

template <class F> cudaError_t launch(const F& f, cudaStream_t stream) {
  call<<<1, F::calls, 0, stream>>>(f); // a block has at most 1,024 threads
  return cudaGetLastError();
}

template cudaError_t launch(const pass&, cudaStream_t);
template cudaError_t launch(const mean&, cudaStream_t);
template cudaError_t launch(const update&, cudaStream_t);
