#undef NDEBUG // one of the kernels fails an assertion

#include "support/faulty_kernels.hpp"

#include <cuda_runtime.h>

#include <cassert>
#include <utility>

namespace troupe::testing {

namespace {

__global__ void write_nowhere(std::uint32_t* nowhere) { *nowhere = threadIdx.x; }

__global__ void trap() { asm("trap;"); }

/// The compiler does not know whether the condition holds.
__global__ void assert_positive(int x) { assert(x > 0); }

template <std::size_t Which> __global__ void fresh(std::uint32_t* x, std::size_t count) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x)
    x[i] += static_cast<std::uint32_t>(Which) + 1;
}

using fresh_kernel = void (*)(std::uint32_t*, std::size_t);

template <std::size_t... Which>
fresh_kernel choose(std::size_t which, std::index_sequence<Which...>) noexcept {
  constexpr fresh_kernel all[] = {fresh<Which>...};
  return all[which];
}

} // namespace

bool may_give(kernel_fault what, int native_code) noexcept {
  switch (what) {
  case kernel_fault::illegal_address:
    return native_code == cudaErrorIllegalAddress;
  case kernel_fault::trap: // the documentation does not name the code
    return native_code == cudaErrorLaunchFailure || native_code == cudaErrorIllegalInstruction;
  case kernel_fault::assertion:
    return native_code == cudaErrorAssert;
  }
  return false;
}

int launch_faulty(kernel_fault what, CUstream_st* stream) noexcept {
  switch (what) {
  case kernel_fault::illegal_address:
    write_nowhere<<<1, 32, 0, stream>>>(reinterpret_cast<std::uint32_t*>(0x10));
    break;
  case kernel_fault::trap:
    trap<<<1, 32, 0, stream>>>();
    break;
  case kernel_fault::assertion:
    assert_positive<<<1, 32, 0, stream>>>(0);
    break;
  }
  return static_cast<int>(cudaGetLastError());
}

int launch_fresh(std::size_t which, std::uint32_t* x, std::size_t count,
                 CUstream_st* stream) noexcept {
  const auto kernel = choose(which, std::make_index_sequence<fresh_kernels>{});
  kernel<<<4, 256, 0, stream>>>(x, count);
  return static_cast<int>(cudaGetLastError());
}

} // namespace troupe::testing
