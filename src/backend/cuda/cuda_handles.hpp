/// The owners of what CUDA and NCCL hand out. They end on the library's threads; pinned memory on
/// any.
#pragma once

#include "backend/cuda/cuda_error.hpp"
#include "backend/cuda/cuda_functions.hpp"
#include "backend/cuda/device_guard.hpp"
#include "backend/unique_handle.hpp"

#include <cuda_runtime_api.h>
#include <nccl.h>

namespace troupe::detail {

struct memory_pool_traits {
  using value_type = cudaMemPool_t;
  static void destroy(cudaMemPool_t pool, int device) noexcept {
    (void)select_device(device); // the call after it fails as well, and says more
    teardown(cudaMemPoolDestroy(pool), "cudaMemPoolDestroy", device);
  }
};

struct event_traits {
  using value_type = cudaEvent_t;
  static void destroy(cudaEvent_t event, int device) noexcept {
    (void)select_device(device); // the call after it fails as well, and says more
    teardown(cudaEventDestroy(event), "cudaEventDestroy", device);
  }
};

/// Stream-ordered memory that is given back in the order of the stream it came from.
struct stream_memory_traits {
  struct value_type {
    void* pointer = nullptr;
    cudaStream_t stream = nullptr;
    friend bool operator==(const value_type&, const value_type&) = default;
  };
  static void destroy(value_type memory, int device) noexcept {
    (void)select_device(device); // the call after it fails as well, and says more
    teardown(cudaFreeAsync(memory.pointer, memory.stream), "cudaFreeAsync", device);
  }
};

struct symmetric_memory_traits {
  using value_type = void*;
  static void destroy(void* memory, int device) noexcept {
    const device_guard guard{device};
    teardown(ncclMemFree(memory), "ncclMemFree", device);
  }
};

/// A communicator that nobody ended in good order is aborted.
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
using unique_symmetric_memory = unique_handle<symmetric_memory_traits>;
using unique_communicator = unique_handle<communicator_traits>;

} // namespace troupe::detail
