/// From the codes of CUDA and NCCL to the library's errors.
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

/// What a code other than cudaSuccess means.
errc classify(cudaError_t code) noexcept;

/// What a code other than ncclSuccess means. ncclInProgress is no failure: see `settle`.
errc classify(ncclResult_t code) noexcept;

/// What a code other than ncclSuccess means, by all that can be known: NCCL has one code for all
/// failures of CUDA.
/// @shape  message: NCCL's last one; free_bytes: of the device, or `unknown_bytes`
/// @source NCCL 2.28.9: CUDACHECK, CUCHECK and the allocations in src/include (checks.h,
/// cudawrap.h,
///         alloc.h) log CUDA's text of the error, or that they failed to allocate, before they give
///         ncclUnhandledCudaError; of host memory, ncclSystemError
errc classify(ncclResult_t code, std::string_view message, std::size_t free_bytes) noexcept;

inline constexpr std::size_t unknown_bytes = std::numeric_limits<std::size_t>::max();

/// The enumerator, as "ncclRemoteError".
const char* name_of(ncclResult_t code) noexcept;

/// What the device has free; `unknown_bytes` if it cannot be asked.
/// @thread one of the library's: its current device may change
std::size_t free_bytes_of(int device) noexcept;

/// The failure of the CUDA function `api`. Clears CUDA's last error of this thread, so that nobody
/// takes it for his own.
caf::error cuda_failure(cudaError_t code, const char* api, int device,
                        std::string_view detail = {}) noexcept;

/// The failure of the NCCL function `api`, with NCCL's last message. If a CUDA fault is behind it,
/// the error is that fault; if the device was full, it is errc::out_of_memory.
/// @thread one of the library's: its current device may change
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

/// A failed call of a destructor: logged and counted. Nothing for cudaSuccess, and for what CUDA
/// says when the process ends.
void teardown(cudaError_t code, const char* api, int device) noexcept;
void teardown(ncclResult_t code, const char* api, int device) noexcept;

/// How many calls of destructors have failed in this process.
std::uint64_t teardown_errors() noexcept;

/// Calls `f`, which gives a `caf::error` or a `caf::expected`; no room for its own objects is
/// errc::out_of_memory.
template <class F> auto no_throw(F&& f) noexcept -> decltype(f()) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return make_error(errc::out_of_memory, "host memory");
  }
}

} // namespace troupe::detail
