#include "backend/cuda/adopted_memory.hpp"

#include "backend/cuda/cuda_error.hpp"
#include "backend/cuda/cuda_functions.hpp"
#include "backend/cuda/device_guard.hpp"
#include "backend/cuda/device_pool.hpp"
#include "backend/cuda/driver_functions.hpp"

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace troupe::detail {

namespace {

/// Asks CUDA for an attribute of memory.
template <class T>
caf::error ask(T& value, CUpointer_attribute what, CUdeviceptr memory, int device) {
  return check(driver::pointer_attribute(&value, what, memory), "cuPointerGetAttribute", device);
}

/// Returns whether the memory was allocated on `device`. CUDA does not know other memory of the
/// host than what it has pinned.
caf::expected<bool> lies_on(int device, CUdeviceptr memory) {
  CUmemorytype type{};
  const auto code = driver::pointer_attribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, memory);
  if (code == cudaErrorInvalidValue)
    return false;
  if (auto err = check(code, "cuPointerGetAttribute", device))
    return err;
  int ordinal = -1;
  if (auto err = ask(ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, memory, device))
    return err;
  unsigned managed = 0;
  if (auto err = ask(managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, memory, device))
    return err;
  return type == CU_MEMORYTYPE_DEVICE && ordinal == device && managed == 0;
}

/// Returns whether the program has mapped the memory itself (`cuMemMap`).
bool is_mapped(CUdeviceptr memory) noexcept {
  CUmemGenericAllocationHandle handle{};
  if (driver::retain_allocation(
          &handle, reinterpret_cast<void*>(static_cast<std::uintptr_t>(memory))) != cudaSuccess)
    return false;
  teardown(driver::release_allocation(handle), "cuMemRelease", -1);
  return true;
}

/// Gives access to the allocation or mapping of `size` bytes that begins at `begin`.
/// `cuMemSetAccess` takes whole mappings only.
caf::error grant(std::span<const CUmemAccessDesc> access, CUdeviceptr begin, std::size_t size,
                 int device) {
  CUmemoryPool pool = nullptr;
  if (auto err = ask(pool, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, begin, device))
    return err;
  if (pool != nullptr)
    return check(driver::set_pool_access(pool, access.data(), access.size()), "cuMemPoolSetAccess",
                 device);
  if (!is_mapped(begin)) // of cudaMalloc: `enable_peer` gives access
    return {};
  return check(driver::set_access(begin, size, access.data(), access.size()), "cuMemSetAccess",
               device);
}

} // namespace

caf::error admit_memory(int device, void* memory, std::size_t size_bytes) noexcept {
  const auto address = static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(memory));
  return no_throw([&]() -> caf::error {
    const auto peers = peers_of(device);
    if (!peers)
      return peers.error();
    std::vector<CUmemAccessDesc> access;
    for (const int peer : *peers)
      access.push_back({{CU_MEM_LOCATION_TYPE_DEVICE, peer}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
    const device_guard guard{device}; // `cuMemGetAddressRange` needs the device's context
    if (auto err = check(guard.error(), "cuCtxPushCurrent", device))
      return err;
    for (std::size_t known = 0; known == 0 || known < size_bytes;) {
      const auto at = address + known;
      const auto here = lies_on(device, at);
      if (!here)
        return here.error();
      if (!*here)
        return make_error({.code = errc::invalid_argument,
                           .detail = known == 0 ? "the memory does not lie on this device"
                                                : "of " + std::to_string(size_bytes) +
                                                      " bytes only the first " +
                                                      std::to_string(known) + " lie on this device",
                           .device = device});
      CUdeviceptr begin = 0;
      std::size_t size = 0;
      if (auto err =
              check(driver::address_range(&begin, &size, at), "cuMemGetAddressRange", device))
        return err;
      if (!access.empty())
        if (auto err = grant(access, begin, size, device))
          return err;
      known = begin + size - address;
    }
    return {};
  });
}

} // namespace troupe::detail
