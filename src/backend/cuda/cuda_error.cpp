#include "backend/cuda/cuda_error.hpp"

#include "backend/cuda/cuda_functions.hpp"
#include "backend/cuda/device_guard.hpp"
#include "backend/cuda/driver_access.hpp"
#include "foundation/log.hpp"
#include <troupe/log.hpp>

#include <driver_types.h>

#include <algorithm>
#include <atomic>
#include <initializer_list>
#include <string>
#include <utility>

namespace troupe::detail {

namespace {

template <class Code> struct meaning {
  Code code;
  errc means;
};

/// Every other code is errc::cuda_error: the call failed, the context is healthy.
constexpr meaning<cudaError_t> cuda_meanings[] = {
    // "To continue using CUDA, the process must be terminated and relaunched" (driver_types.h).
    {cudaErrorContained, errc::device_fault},
    {cudaErrorIllegalAddress, errc::device_fault},
    {cudaErrorLaunchTimeout, errc::device_fault},
    {cudaErrorAssert, errc::device_fault},
    {cudaErrorHardwareStackError, errc::device_fault},
    {cudaErrorIllegalInstruction, errc::device_fault},
    {cudaErrorMisalignedAddress, errc::device_fault},
    {cudaErrorInvalidAddressSpace, errc::device_fault},
    {cudaErrorInvalidPc, errc::device_fault},
    {cudaErrorLaunchFailure, errc::device_fault},
    {cudaErrorTensorMemoryLeak, errc::device_fault},
    {cudaErrorMpsClientTerminated, errc::device_fault},
    {cudaErrorExternalDevice, errc::device_fault},
    // The header does not say so for these codes, but memory contents cannot be trusted after them.
    {cudaErrorECCUncorrectable, errc::device_fault},
    {cudaErrorNvlinkUncorrectable, errc::device_fault},
    {cudaErrorContextIsDestroyed, errc::device_fault},

    {cudaErrorMemoryAllocation, errc::out_of_memory},

    {cudaErrorInitializationError, errc::unavailable},
    {cudaErrorCudartUnloading, errc::unavailable},
    {cudaErrorStubLibrary, errc::unavailable},
    {cudaErrorInsufficientDriver, errc::unavailable},
    {cudaErrorDevicesUnavailable, errc::unavailable},
    {cudaErrorNoDevice, errc::unavailable},
    {cudaErrorDeviceNotLicensed, errc::unavailable},
    {cudaErrorSoftwareValidityNotEstablished, errc::unavailable},
    {cudaErrorStartupFailure, errc::unavailable},
    {cudaErrorDeviceAlreadyInUse, errc::unavailable},
    {cudaErrorSystemNotReady, errc::unavailable},
    {cudaErrorSystemDriverMismatch, errc::unavailable},
    {cudaErrorCompatNotSupportedOnDevice, errc::unavailable},
    {cudaErrorMpsConnectionFailed, errc::unavailable},
    {cudaErrorMpsRpcFailure, errc::unavailable},
    {cudaErrorMpsServerNotReady, errc::unavailable},
    {cudaErrorMpsMaxClientsReached, errc::unavailable},
    {cudaErrorMpsMaxConnectionsReached, errc::unavailable},

    {cudaErrorCallRequiresNewerDriver, errc::not_supported},
    {cudaErrorNoKernelImageForDevice, errc::not_supported},
    {cudaErrorPeerAccessUnsupported, errc::not_supported},
    {cudaErrorUnsupportedPtxVersion, errc::not_supported},
    {cudaErrorNotSupported, errc::not_supported},
    {cudaErrorCdpNotSupported, errc::not_supported},

    {cudaSuccess, errc::internal}, // not a failure: must not be asked
};

/// Every other code, also one of a later NCCL, is errc::nccl_error: the communicator is lost.
constexpr meaning<ncclResult_t> nccl_meanings[] = {
    {ncclInvalidArgument, errc::invalid_argument},
    {ncclSuccess, errc::internal},
    {ncclInProgress, errc::internal},
};

template <class Code, std::size_t N>
errc find(const meaning<Code> (&table)[N], Code code, errc otherwise) noexcept {
  for (const auto& x : table)
    if (x.code == code)
      return x.means;
  return otherwise;
}

caf::error to_error(failure x) noexcept {
  const errc code = x.code;
  try {
    return make_error(std::move(x));
  } catch (const std::bad_alloc&) {
    return make_error(code, {});
  }
}

/// Returns NCCL's last message. NCCL keeps one for all threads, so it may be another thread's.
std::string last_nccl_message() {
  const char* text = ncclGetLastError(nullptr);
  return text == nullptr ? std::string{} : std::string{text};
}

/// Returns the CUDA fault in `last`, the thread's last error, or the fault that a call without
/// effect on `device` gives; else cudaSuccess.
cudaError_t sticky_fault(cudaError_t last, int device) noexcept {
  auto is_fault = [](cudaError_t code) {
    return code != cudaSuccess && classify(code) == errc::device_fault;
  };
  if (is_fault(last) || device < 0)
    return is_fault(last) ? last : cudaSuccess;
  auto code = select_device(device);
  if (code == cudaSuccess)
    code = cudaFree(nullptr);
  (void)cudaGetLastError();
  return is_fault(code) ? code : cudaSuccess;
}

/// With less free memory, ncclUnhandledCudaError counts as out of memory, since another thread's
/// message may have replaced the one about memory. NCCL can build nothing with less: its buffers
/// for one connection take some MiB each.
constexpr std::size_t too_few_bytes = std::size_t{64} << 20;

bool contains_any(std::string_view text, std::initializer_list<std::string_view> parts) noexcept {
  return std::ranges::any_of(parts, [&](auto x) { return text.find(x) != text.npos; });
}

std::atomic<std::uint64_t> failed_teardowns{0};

void count_teardown(const char* api, const caf::error& why) noexcept {
  failed_teardowns.fetch_add(1, std::memory_order_relaxed);
  log(log_level::warning, api, why);
}

} // namespace

std::size_t free_bytes_of(int device) noexcept {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  if (device < 0 || select_device(device) != cudaSuccess ||
      cudaMemGetInfo(&free_bytes, &total_bytes) != cudaSuccess) {
    (void)cudaGetLastError();
    return unknown_bytes;
  }
  return free_bytes;
}

errc classify(cudaError_t code) noexcept { return find(cuda_meanings, code, errc::cuda_error); }

errc classify(ncclResult_t code) noexcept { return find(nccl_meanings, code, errc::nccl_error); }

errc classify(ncclResult_t code, std::string_view message, std::size_t free_bytes) noexcept {
  if (code == ncclUnhandledCudaError &&
      (free_bytes < too_few_bytes ||
       contains_any(message, {"out of memory", "Failed to CUDA malloc", "Failed to CUDA calloc",
                              "Failed to CUDA host alloc"})))
    return errc::out_of_memory;
  if (code == ncclSystemError &&
      contains_any(message, {"Failed to malloc", "Cannot allocate memory"}))
    return errc::out_of_memory;
  return classify(code);
}

const char* name_of(ncclResult_t code) noexcept {
  switch (code) {
  case ncclSuccess:
    return "ncclSuccess";
  case ncclUnhandledCudaError:
    return "ncclUnhandledCudaError";
  case ncclSystemError:
    return "ncclSystemError";
  case ncclInternalError:
    return "ncclInternalError";
  case ncclInvalidArgument:
    return "ncclInvalidArgument";
  case ncclInvalidUsage:
    return "ncclInvalidUsage";
  case ncclRemoteError:
    return "ncclRemoteError";
  case ncclInProgress:
    return "ncclInProgress";
  default:
    return "unknown ncclResult_t";
  }
}

caf::error cuda_failure(cudaError_t code, const char* api, int device,
                        std::string_view detail) noexcept {
  (void)cudaGetLastError();
  try {
    failure x{.code = classify(code),
              .detail = cudaGetErrorString(code),
              .api = api,
              .native_name = cudaGetErrorName(code),
              .native_code = code,
              .device = device};
    if (!detail.empty())
      x.detail.append("; ").append(detail);
    return to_error(std::move(x));
  } catch (const std::bad_alloc&) {
    return make_error(classify(code), {});
  }
}

caf::error nccl_failure(ncclResult_t code, const char* api, int device, int rank) noexcept {
  const auto last = cudaGetLastError(); // set if NCCL shares the program's CUDA runtime
  try {
    failure x{.detail = ncclGetErrorString(code),
              .api = api,
              .native_name = name_of(code),
              .native_code = code,
              .device = device,
              .rank = rank};
    const auto message = last_nccl_message();
    if (!message.empty())
      x.detail.append("; NCCL's last message: ").append(message);
    const bool of_cuda = code == ncclUnhandledCudaError;
    const auto fault = of_cuda ? sticky_fault(last, device) : cudaSuccess;
    if (fault != cudaSuccess) {
      x.code = errc::device_fault;
      x.native_name = cudaGetErrorName(fault);
      x.native_code = fault;
    } else {
      const auto free_bytes = of_cuda ? free_bytes_of(device) : unknown_bytes;
      x.code = of_cuda && last == cudaErrorMemoryAllocation ? errc::out_of_memory
                                                            : classify(code, message, free_bytes);
      if (free_bytes != unknown_bytes)
        x.detail.append("; ").append(std::to_string(free_bytes)).append(" bytes are free");
    }
    return to_error(std::move(x));
  } catch (const std::bad_alloc&) {
    return make_error(classify(code), {});
  }
}

caf::error driver_access::refusal(int device) noexcept {
  try {
    return to_error({.code = errc::device_fault,
                     .detail = "CUDA is not called any more in this process",
                     .device = device});
  } catch (const std::bad_alloc&) {
    return make_error(errc::device_fault, {});
  }
}

void teardown(cudaError_t code, const char* api, int device) noexcept {
  if (code != cudaSuccess && code != cudaErrorCudartUnloading)
    count_teardown(api, cuda_failure(code, api, device));
}

void teardown(ncclResult_t code, const char* api, int device) noexcept {
  if (code != ncclSuccess && code != ncclInProgress)
    count_teardown(api, nccl_failure(code, api, device));
}

std::uint64_t teardown_errors() noexcept {
  return failed_teardowns.load(std::memory_order_relaxed);
}

} // namespace troupe::detail
