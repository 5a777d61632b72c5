/// Direct calls of CUDA.
#pragma once

#include "contestant.hpp"

#include <cuda_runtime_api.h>

#include <string>

namespace bench {

inline void check(cudaError_t code, const char* call) {
  if (code != cudaSuccess)
    fail(std::string{call} + ": " + cudaGetErrorString(code));
}

/// An event of the current device.
class cuda_event {
public:
  cuda_event() {
    check(cudaEventCreateWithFlags(&native_, cudaEventDisableTiming), "cudaEventCreate");
  }
  ~cuda_event() { cudaEventDestroy(native_); }
  cuda_event(const cuda_event&) = delete;
  cuda_event& operator=(const cuda_event&) = delete;

  void record(cudaStream_t stream) { check(cudaEventRecord(native_, stream), "cudaEventRecord"); }

  void spin() {
    auto code = cudaEventQuery(native_);
    while (code == cudaErrorNotReady)
      code = cudaEventQuery(native_);
    check(code, "cudaEventQuery");
  }

private:
  cudaEvent_t native_ = nullptr;
};

} // namespace bench
