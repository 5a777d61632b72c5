/// Maps the codes of CUDA and NCCL to the library's errors.
#pragma once

#include <troupe/error.hpp>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <string_view>

namespace troupe::detail {

/// Returns the meaning of a code other than cudaSuccess.
errc classify(cudaError_t code) noexcept;

/// Returns the meaning of a code other than ncclSuccess. ncclInProgress is no failure: see
/// `settle`.
errc classify(ncclResult_t code) noexcept;

/// Returns the meaning of a code other than ncclSuccess, with the help of NCCL's message and the
/// free memory: NCCL has one code for all CUDA failures.
/// @shape  message: NCCL's last one; free_bytes: of the device, or `unknown_bytes`
/// @source NCCL 2.28.9: CUDACHECK, CUCHECK and the allocations in src/include (checks.h,
///         cudawrap.h, alloc.h) log CUDA's error text, or the failed allocation, before they return
///         ncclUnhandledCudaError; for host memory, ncclSystemError
errc classify(ncclResult_t code, std::string_view message, std::size_t free_bytes) noexcept;

inline constexpr std::size_t unknown_bytes = std::numeric_limits<std::size_t>::max();

/// Returns the name of the enumerator, such as "ncclRemoteError".
const char* name_of(ncclResult_t code) noexcept;

/// Returns the free memory of a device; `unknown_bytes` if CUDA cannot tell.
/// @thread a library thread: its current device may change
std::size_t free_bytes_of(int device) noexcept;

/// Returns the failure of the CUDA function `api`. Clears this thread's last CUDA error, so that no
/// other code takes it for its own.
caf::error cuda_failure(cudaError_t code, const char* api, int device,
                        std::string_view detail = {}) noexcept;

/// Returns the failure of the NCCL function `api`, with NCCL's last message. If a CUDA fault caused
/// it, the error is that fault; if the device was full, it is errc::out_of_memory.
/// @thread a library thread: its current device may change
caf::error nccl_failure(ncclResult_t code, const char* api, int device, int rank = -1) noexcept;

[[nodiscard]] inline caf::error check(cudaError_t code, const char* api, int device) noexcept {
  if (code == cudaSuccess) [[likely]]
    return {};
  return cuda_failure(code, api, device);
}

[[nodiscard]] inline caf::error check(ncclResult_t code, const char* api, int device,
                                      int rank = -1) noexcept {
  if (code == ncclSuccess) [[likely]]
    return {};
  return nccl_failure(code, api, device, rank);
}

/// Logs and counts a failed call in a destructor. Ignores cudaSuccess, and the code that CUDA
/// returns when the process ends.
void teardown(cudaError_t code, const char* api, int device) noexcept;
void teardown(ncclResult_t code, const char* api, int device) noexcept;

/// Returns the number of calls that have failed in destructors of this process.
std::uint64_t teardown_errors() noexcept;

/// Calls `f`, which returns a `caf::error` or a `caf::expected`. Turns std::bad_alloc into
/// errc::out_of_memory.
template <class F> auto no_throw(F&& f) noexcept -> decltype(f()) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return make_error(errc::out_of_memory, "host memory");
  }
}

} // namespace troupe::detail
