/// The functions of the CUDA runtime and of NCCL that the backend calls. They are loaded at run
/// time, so that a program with this library starts on a machine that has neither.
#pragma once

#include <troupe/error.hpp>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstddef>
#include <span>
#include <string>
#include <type_traits>

#include <dlfcn.h>

/// Every function of the CUDA runtime that the backend may call.
#define TROUPE_CUDART_FUNCTIONS(X)                                                                 \
  X(cudaDeviceCanAccessPeer)                                                                       \
  X(cudaDeviceEnablePeerAccess)                                                                    \
  X(cudaDeviceGetAttribute)                                                                        \
  X(cudaDeviceGetDefaultMemPool)                                                                   \
  X(cudaDeviceGetP2PAttribute)                                                                     \
  X(cudaDeviceGetPCIBusId)                                                                         \
  X(cudaDriverGetVersion)                                                                          \
  X(cudaEventCreateWithFlags)                                                                      \
  X(cudaEventDestroy)                                                                              \
  X(cudaEventQuery)                                                                                \
  X(cudaEventRecord)                                                                               \
  X(cudaEventSynchronize)                                                                          \
  X(cudaFree)                                                                                      \
  X(cudaFreeAsync)                                                                                 \
  X(cudaFreeHost)                                                                                  \
  X(cudaGetDevice)                                                                                 \
  X(cudaGetDeviceCount)                                                                            \
  X(cudaGetDeviceProperties)                                                                       \
  X(cudaGetDriverEntryPointByVersion)                                                              \
  X(cudaGetErrorName)                                                                              \
  X(cudaGetErrorString)                                                                            \
  X(cudaGetLastError)                                                                              \
  X(cudaGraphDestroy)                                                                              \
  X(cudaGraphExecDestroy)                                                                          \
  X(cudaGraphInstantiateWithFlags)                                                                 \
  X(cudaGraphLaunch)                                                                               \
  X(cudaGraphUpload)                                                                               \
  X(cudaHostRegister)                                                                              \
  X(cudaHostUnregister)                                                                            \
  X(cudaLaunchHostFunc)                                                                            \
  X(cudaLibraryGetKernel)                                                                          \
  X(cudaLibraryLoadData)                                                                           \
  X(cudaMemGetInfo)                                                                                \
  X(cudaMemPoolCreate)                                                                             \
  X(cudaMemPoolDestroy)                                                                            \
  X(cudaMemPoolGetAttribute)                                                                       \
  X(cudaMemPoolSetAccess)                                                                          \
  X(cudaMemPoolSetAttribute)                                                                       \
  X(cudaMemPoolTrimTo)                                                                             \
  X(cudaMemcpyAsync)                                                                               \
  X(cudaMemcpyPeerAsync)                                                                           \
  X(cudaMemsetAsync)                                                                               \
  X(cudaRuntimeGetVersion)                                                                         \
  X(cudaSetDevice)                                                                                 \
  X(cudaStreamBeginCapture)                                                                        \
  X(cudaStreamCreateWithFlags)                                                                     \
  X(cudaStreamDestroy)                                                                             \
  X(cudaStreamEndCapture)                                                                          \
  X(cudaStreamIsCapturing)                                                                         \
  X(cudaStreamQuery)                                                                               \
  X(cudaStreamSynchronize)                                                                         \
  X(cudaStreamWaitEvent)

/// Functions with overloads in CUDA's C++ header, and their type in the library.
#define TROUPE_OVERLOADED_CUDART_FUNCTIONS(X)                                                      \
  X(cudaHostAlloc, cudaError_t(void**, std::size_t, unsigned))                                     \
  X(cudaHostGetDevicePointer, cudaError_t(void**, void*, unsigned))                                \
  X(cudaMallocAsync, cudaError_t(void**, std::size_t, cudaStream_t))                               \
  X(cudaMallocFromPoolAsync, cudaError_t(void**, std::size_t, cudaMemPool_t, cudaStream_t))        \
  X(cudaMemcpyBatchAsync,                                                                          \
    cudaError_t(void* const*, const void* const*, const std::size_t*, std::size_t,                 \
                cudaMemcpyAttributes*, std::size_t*, std::size_t, cudaStream_t))

/// Every function of NCCL that the backend may call.
#define TROUPE_NCCL_FUNCTIONS(X)                                                                   \
  X(ncclAllGather)                                                                                 \
  X(ncclAllReduce)                                                                                 \
  X(ncclBroadcast)                                                                                 \
  X(ncclCommAbort)                                                                                 \
  X(ncclCommDestroy)                                                                               \
  X(ncclCommFinalize)                                                                              \
  X(ncclCommGetAsyncError)                                                                         \
  X(ncclCommInitRankConfig)                                                                        \
  X(ncclCommRevoke)                                                                                \
  X(ncclGetErrorString)                                                                            \
  X(ncclGetLastError)                                                                              \
  X(ncclGetUniqueId)                                                                               \
  X(ncclGetVersion)                                                                                \
  X(ncclGroupEnd)                                                                                  \
  X(ncclGroupStart)                                                                                \
  X(ncclRecv)                                                                                      \
  X(ncclRedOpCreatePreMulSum)                                                                      \
  X(ncclRedOpDestroy)                                                                              \
  X(ncclReduce)                                                                                    \
  X(ncclReduceScatter)                                                                             \
  X(ncclSend)

namespace troupe::detail {

/// Returns the result of a call whose function is not loaded.
template <class R> R not_loaded() noexcept;
template <> inline cudaError_t not_loaded() noexcept { return cudaErrorSharedObjectSymbolNotFound; }
template <> inline ncclResult_t not_loaded() noexcept { return ncclSystemError; }
template <> inline const char* not_loaded() noexcept { return "the library is not loaded"; }

template <class Function> class loaded_function;

/// A function of a library that is loaded at run time; called like the function.
template <class R, class... A> class loaded_function<R(A...)> {
public:
  R operator()(A... arguments) const { return function_(arguments...); }

  /// Loads the function. Returns false if `library` does not have it; its calls then give an error.
  /// @thread before any call
  bool load(void* library, const char* name) noexcept {
    auto* const found = reinterpret_cast<R (*)(A...)>(dlsym(library, name));
    function_ = found != nullptr ? found : missing;
    return found != nullptr;
  }

private:
  static R missing(A...) noexcept { return not_loaded<R>(); }

  R (*function_)(A...) = missing;
};

/// Loads the CUDA runtime and its functions, once in a process. After an error the next call tries
/// again. If the program has loaded the runtime, or is linked with it, that same runtime is used:
/// it shares the last errors of threads.
/// @thread  any, before any other call of these functions
/// @errors  errc::unavailable, with the names that were tried
caf::error load_cudart() noexcept;

/// Same for NCCL.
/// @errors errc::unavailable: also if it is older than `oldest_nccl`
caf::error load_nccl() noexcept;

/// The oldest NCCL that has every function in use.
inline constexpr int oldest_nccl = NCCL_VERSION(2, 28, 7);

/// Returns "2.28.9" for 22809.
std::string nccl_version_text(int version);

/// Loads the first of `names` that can be loaded. The library is never unloaded, since other parts
/// of the program may use it.
/// @shape  names: as dlopen takes them, at least one; the first one names the library in the error
/// @errors errc::unavailable, with the reason for each name
caf::expected<void*> load_library(std::span<const std::string> names);

/// Selects the function of type `F` among overloads.
template <class F> F& only(F* function) noexcept;

// The objects hide the functions of the same names in the library's own namespace, so that code
// there cannot link to the functions by mistake.
#define TROUPE_LOADED_FUNCTION(name) inline constinit loaded_function<decltype(::name)> name;
TROUPE_CUDART_FUNCTIONS(TROUPE_LOADED_FUNCTION)
TROUPE_NCCL_FUNCTIONS(TROUPE_LOADED_FUNCTION)
#undef TROUPE_LOADED_FUNCTION
#define TROUPE_LOADED_FUNCTION(name, ...)                                                          \
  inline constinit loaded_function<std::remove_reference_t<decltype(only<__VA_ARGS__>(::name))>>   \
      name;
TROUPE_OVERLOADED_CUDART_FUNCTIONS(TROUPE_LOADED_FUNCTION)
#undef TROUPE_LOADED_FUNCTION

} // namespace troupe::detail
