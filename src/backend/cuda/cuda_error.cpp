#include "backend/cuda/cuda_error.hpp"

#include "backend/cuda/cuda_functions.hpp"
#include "backend/cuda/device_guard.hpp"
#include "backend/cuda/driver_access.hpp"
#include "core/log.hpp"
#include <troupe/error.hpp>
#include <troupe/log.hpp>

#include <cuda_runtime_api.h>
#include <driver_types.h>
#include <nccl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <string_view>
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
    // The header does not say it of these, but what lies in memory cannot be trusted after them.
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

    {cudaSuccess, errc::internal}, // nothing failed: asking was the mistake
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

/// NCCL keeps one message for all threads: the text may be of another one's failure.
std::string last_nccl_message() {
  const char* text = ncclGetLastError(nullptr);
  return text == nullptr ? std::string{} : std::string{text};
}

/// The CUDA fault that this thread, or a call that does nothing on `device`, knows of; else
/// cudaSuccess.
cudaError_t sticky_fault(int device) noexcept {
  auto is_fault = [](cudaError_t code) {
    return code != cudaSuccess && classify(code) == errc::device_fault;
  };
  if (const auto code = cudaGetLastError(); is_fault(code) || device < 0)
    return is_fault(code) ? code : cudaSuccess;
  auto code = select_device(device);
  if (code == cudaSuccess)
    code = cudaFree(nullptr);
  (void)cudaGetLastError();
  return is_fault(code) ? code : cudaSuccess;
}

std::atomic<std::uint64_t> failed_teardowns{0};

void count_teardown(const char* api, const caf::error& why) noexcept {
  failed_teardowns.fetch_add(1, std::memory_order_relaxed);
  log(log_level::warning, api, why);
}

} // namespace

errc classify(cudaError_t code) noexcept { return find(cuda_meanings, code, errc::cuda_error); }

errc classify(ncclResult_t code) noexcept { return find(nccl_meanings, code, errc::nccl_error); }

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
    failure x;
    x.code = classify(code);
    x.detail = cudaGetErrorString(code);
    if (!detail.empty())
      x.detail.append("; ").append(detail);
    x.api = api;
    x.native_name = cudaGetErrorName(code);
    x.native_code = code;
    x.device = device;
    return to_error(std::move(x));
  } catch (const std::bad_alloc&) {
    return make_error(classify(code), {});
  }
}

caf::error nccl_failure(ncclResult_t code, const char* api, int device, int rank) noexcept {
  try {
    failure x;
    x.code = classify(code);
    x.native_name = name_of(code);
    x.native_code = code;
    x.detail = ncclGetErrorString(code);
    if (const auto message = last_nccl_message(); !message.empty())
      x.detail.append("; NCCL's last message: ").append(message);
    if (const auto fault = code == ncclUnhandledCudaError ? sticky_fault(device) : cudaSuccess;
        fault != cudaSuccess) {
      x.code = errc::device_fault;
      x.native_name = cudaGetErrorName(fault);
      x.native_code = fault;
    }
    x.api = api;
    x.device = device;
    x.rank = rank;
    return to_error(std::move(x));
  } catch (const std::bad_alloc&) {
    return make_error(classify(code), {});
  }
}

caf::error driver_access::refusal(int device) noexcept {
  try {
    failure x;
    x.code = errc::device_fault;
    x.device = device;
    x.detail = "CUDA is not called any more in this process";
    return to_error(std::move(x));
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
