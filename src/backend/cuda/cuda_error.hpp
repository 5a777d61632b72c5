/// From the codes of CUDA and NCCL to the library's errors.
#pragma once

#include <troupe/error.hpp>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstdint>
#include <new>
#include <string_view>

namespace troupe::detail {

/// What a code other than cudaSuccess means.
errc classify(cudaError_t code) noexcept;

/// What a code other than ncclSuccess means. ncclInProgress is no failure: see `settle`.
errc classify(ncclResult_t code) noexcept;

/// The enumerator, as "ncclRemoteError".
const char* name_of(ncclResult_t code) noexcept;

/// The failure of the CUDA function `api`. Clears CUDA's last error of this thread, so that nobody
/// takes it for his own.
caf::error cuda_failure(cudaError_t code, const char* api, int device,
                        std::string_view detail = {}) noexcept;

/// The failure of the NCCL function `api`, with NCCL's last message. If a CUDA fault is behind it,
/// the error is that fault.
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
