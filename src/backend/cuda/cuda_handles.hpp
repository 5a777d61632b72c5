/// Owners of CUDA and NCCL resources. They are destroyed on the library's threads.
#pragma once

#include "backend/cuda/cuda_error.hpp"
#include "backend/cuda/cuda_functions.hpp"
#include "backend/cuda/device_guard.hpp"
#include "foundation/unique_handle.hpp"

#include <cuda_runtime_api.h>
#include <nccl.h>

namespace troupe::detail {

struct memory_pool_traits {
  using value_type = cudaMemPool_t;
  static void destroy(cudaMemPool_t pool, int device) noexcept {
    (void)select_device(device); // if this fails, the next call fails, too, and says more
    teardown(cudaMemPoolDestroy(pool), "cudaMemPoolDestroy", device);
  }
};

struct event_traits {
  using value_type = cudaEvent_t;
  static void destroy(cudaEvent_t event, int device) noexcept {
    (void)select_device(device); // if this fails, the next call fails, too, and says more
    teardown(cudaEventDestroy(event), "cudaEventDestroy", device);
  }
};

/// Stream-ordered memory, freed in the order of the stream that it was allocated in.
struct stream_memory_traits {
  struct value_type {
    void* pointer = nullptr;
    cudaStream_t stream = nullptr;
    friend bool operator==(const value_type&, const value_type&) = default;
  };
  static void destroy(value_type memory, int device) noexcept {
    (void)select_device(device); // if this fails, the next call fails, too, and says more
    teardown(cudaFreeAsync(memory.pointer, memory.stream), "cudaFreeAsync", device);
  }
};

/// Aborts a communicator that was not ended in good order.
struct communicator_traits {
  using value_type = ncclComm_t;
  static void destroy(ncclComm_t communicator, int device) noexcept {
    (void)select_device(device);
    teardown(ncclCommAbort(communicator), "ncclCommAbort", device);
  }
};

using unique_event = unique_handle<event_traits>;
using unique_memory_pool = unique_handle<memory_pool_traits>;
using unique_stream_memory = unique_handle<stream_memory_traits>;
using unique_communicator = unique_handle<communicator_traits>;

} // namespace troupe::detail
