/// A memory resource of libcu++ (`cuda::mr`) over the memory of a device. The program provides the
/// headers of CUDA and libcu++; troupe/troupe.hpp does not include this header.
#pragma once

#include <troupe/detail/device_resource.hpp>

#include <utility>

namespace troupe {

namespace detail {

struct cuda_failure {
  /// @errors throws cuda::cuda_error: cudaErrorMemoryAllocation, or cudaErrorUnknown for all that
  ///         is not a lack of memory, with the text of the error
  [[noreturn]] static void raise(const caf::error& why) {
    const auto code =
        code_of(why) == errc::out_of_memory ? cudaErrorMemoryAllocation : cudaErrorUnknown;
    throw cuda::cuda_error{code, describe(why).c_str()};
  }
};

} // namespace detail

/// Satisfies `cuda::mr::resource_with<cuda::mr::device_accessible>` of CCCL from 3.1 on, and
/// `cuda::mr::async_resource_with<...>` of earlier ones.
///
/// Memory comes from the pool of the device, as that of `device::allocate`, and counts as its. Each
/// allocation blocks the calling thread until the memory is there, for about the time of an empty
/// request. So the memory can be used in any stream, and the stream of an allocation is ignored. It
/// is freed behind the work that is in the stream of the deallocation then; `cudaStreamPerThread`
/// is waited for. While memory is allocated, the device cannot be reset (errc::buffer_acquired).
/// The resource, its copies and what is allocated keep the device and the actor system alive: end
/// them before the actor system. On the host backend the memory is host memory.
/// @thread any, several at once; allocations only where blocking is allowed
/// @errors throws cuda::cuda_error
class cuda_resource : public detail::device_resource<detail::cuda_failure> {
public:
  using device_resource::device_resource;
};

} // namespace troupe
