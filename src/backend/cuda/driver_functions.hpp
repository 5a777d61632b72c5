/// The functions of the CUDA driver that the backend calls, where the runtime has none or a slower
/// one.
#pragma once

#include "backend/cuda/cuda_functions.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>

namespace troupe::detail {

template <class Function> class driver_function;

/// A function of the driver; called like the function. Its first call finds it through the runtime,
/// so that the library does not link to the driver.
template <class... A> class driver_function<CUresult(A...)> {
public:
  /// @shape since: the first CUDA version with the function in this form
  constexpr driver_function(const char* name, unsigned since) noexcept
      : name_(name), since_(since) {}

  /// The errors of the driver have the numbers of the runtime's.
  /// @source driver_types.h, cuda.h
  /// @errors cudaErrorCallRequiresNewerDriver
  cudaError_t operator()(A... arguments) noexcept {
    auto* function = found_.load(std::memory_order_acquire);
    if (function == nullptr) [[unlikely]] {
      if (const auto code = find(function); code != cudaSuccess)
        return code;
    }
    return static_cast<cudaError_t>(function(arguments...));
  }

private:
  using function_type = CUresult(A...);

  cudaError_t find(function_type*& function) noexcept {
    void* entry = nullptr;
    auto found = cudaDriverEntryPointSymbolNotFound;
    const auto code =
        cudaGetDriverEntryPointByVersion(name_, &entry, since_, cudaEnableDefault, &found);
    if (code != cudaSuccess)
      return code;
    if (found != cudaDriverEntryPointSuccess)
      return cudaErrorCallRequiresNewerDriver;
    function = reinterpret_cast<function_type*>(entry);
    found_.store(function, std::memory_order_release);
    return cudaSuccess;
  }

  const char* const name_;
  const unsigned since_;
  std::atomic<function_type*> found_ = nullptr;
};

namespace driver {

inline constinit driver_function<decltype(::cuFuncLoad)> load{"cuFuncLoad", 12040};
inline constinit driver_function<decltype(::cuDeviceGet)> get_device{"cuDeviceGet", 2000};
inline constinit driver_function<decltype(::cuDeviceGetAttribute)> get_attribute_of{
    "cuDeviceGetAttribute", 2000};
inline constinit driver_function<decltype(::cuCtxGetCurrent)> get_context{"cuCtxGetCurrent", 4000};
inline constinit driver_function<decltype(::cuCtxPushCurrent)> push_context{"cuCtxPushCurrent",
                                                                            4000};
inline constinit driver_function<decltype(::cuCtxPopCurrent)> pop_context{"cuCtxPopCurrent", 4000};
inline constinit driver_function<decltype(::cuDevicePrimaryCtxRetain)> retain_context{
    "cuDevicePrimaryCtxRetain", 7000};
inline constinit driver_function<decltype(::cuDevicePrimaryCtxRelease)> release_context{
    "cuDevicePrimaryCtxRelease", 11000};
inline constinit driver_function<decltype(::cuGraphDestroy)> destroy_graph{"cuGraphDestroy", 10000};
inline constinit driver_function<decltype(::cuGraphGetNodes)> get_nodes{"cuGraphGetNodes", 10000};
inline constinit driver_function<decltype(::cuGraphKernelNodeGetAttribute)> get_node_attribute{
    "cuGraphKernelNodeGetAttribute", 11000};
inline constinit driver_function<decltype(::cuGraphKernelNodeGetParams)> get_kernel_parameters{
    "cuGraphKernelNodeGetParams", 12000};
inline constinit driver_function<decltype(::cuGraphNodeGetType)> get_type{"cuGraphNodeGetType",
                                                                          10000};
inline constinit driver_function<decltype(::cuKernelGetAttribute)> get_attribute{
    "cuKernelGetAttribute", 12000};
inline constinit driver_function<decltype(::cuKernelGetFunction)> get_function{
    "cuKernelGetFunction", 12000};
inline constinit driver_function<decltype(::cuLaunchKernel)> launch{"cuLaunchKernel", 4000};
inline constinit driver_function<decltype(::cuLaunchKernelEx)> launch_with{"cuLaunchKernelEx",
                                                                           11060};
inline constinit driver_function<decltype(::cuMemGetAddressRange)> address_range{
    "cuMemGetAddressRange", 3020};
inline constinit driver_function<decltype(::cuMemAddressFree)> free_addresses{"cuMemAddressFree",
                                                                              10020};
inline constinit driver_function<decltype(::cuMemAddressReserve)> reserve_addresses{
    "cuMemAddressReserve", 10020};
inline constinit driver_function<decltype(::cuMemCreate)> create_memory{"cuMemCreate", 10020};
inline constinit driver_function<decltype(::cuMemExportToShareableHandle)> export_memory{
    "cuMemExportToShareableHandle", 10020};
inline constinit driver_function<decltype(::cuMemImportFromShareableHandle)> import_memory{
    "cuMemImportFromShareableHandle", 10020};
inline constinit driver_function<decltype(::cuMemGetAllocationGranularity)> granularity{
    "cuMemGetAllocationGranularity", 10020};
inline constinit driver_function<decltype(::cuMemMap)> map_memory{"cuMemMap", 10020};
inline constinit driver_function<decltype(::cuMemUnmap)> unmap_memory{"cuMemUnmap", 10020};
inline constinit driver_function<decltype(::cuMemPoolSetAccess)> set_pool_access{
    "cuMemPoolSetAccess", 11020};
inline constinit driver_function<decltype(::cuMemRelease)> release_allocation{"cuMemRelease",
                                                                              10020};
inline constinit driver_function<decltype(::cuMemRetainAllocationHandle)> retain_allocation{
    "cuMemRetainAllocationHandle", 11000};
inline constinit driver_function<decltype(::cuMemSetAccess)> set_access{"cuMemSetAccess", 10020};
inline constinit driver_function<decltype(::cuPointerGetAttribute)> pointer_attribute{
    "cuPointerGetAttribute", 4000};
inline constinit driver_function<decltype(::cuStreamBeginCapture)> begin_capture{
    "cuStreamBeginCapture", 10010};
inline constinit driver_function<decltype(::cuStreamEndCapture)> end_capture{"cuStreamEndCapture",
                                                                             10000};
inline constinit driver_function<decltype(::cuStreamIsCapturing)> is_capturing{
    "cuStreamIsCapturing", 10000};
inline constinit driver_function<decltype(::cuStreamWaitValue32)> wait_for_word32{
    "cuStreamWaitValue32", 11070};
inline constinit driver_function<decltype(::cuStreamWaitValue64)> wait_for_word64{
    "cuStreamWaitValue64", 11070};
inline constinit driver_function<decltype(::cuStreamWriteValue32)> write_word32{
    "cuStreamWriteValue32", 11070};

} // namespace driver

} // namespace troupe::detail
