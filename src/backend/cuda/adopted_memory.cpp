#include "backend/cuda/adopted_memory.hpp"

#include "backend/cuda/cuda_error.hpp"
#include "backend/cuda/device_pool.hpp"
#include "backend/cuda/driver_functions.hpp"

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace troupe::detail {

namespace {

/// Returns whether the memory was allocated on `device`. CUDA does not know other memory of the
/// host than what it has pinned.
bool lies_on(int device, CUdeviceptr memory) noexcept {
  CUmemorytype type{};
  int ordinal = -1;
  unsigned managed = 0;
  return driver::pointer_attribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, memory) ==
             cudaSuccess &&
         driver::pointer_attribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, memory) ==
             cudaSuccess &&
         driver::pointer_attribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, memory) ==
             cudaSuccess &&
         type == CU_MEMORYTYPE_DEVICE && ordinal == device && managed == 0;
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

} // namespace

caf::error admit_memory(int device, void* memory) noexcept {
  const auto address = static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(memory));
  return no_throw([&]() -> caf::error {
    if (!lies_on(device, address))
      return make_error({.code = errc::invalid_argument,
                         .detail = "the memory does not lie on this device",
                         .device = device});
    const auto peers = peers_of(device);
    if (!peers)
      return peers.error();
    std::vector<CUmemAccessDesc> access;
    for (const int peer : *peers)
      access.push_back({{CU_MEM_LOCATION_TYPE_DEVICE, peer}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
    if (access.empty())
      return {};
    CUmemoryPool pool = nullptr;
    if (auto err =
            check(driver::pointer_attribute(&pool, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, address),
                  "cuPointerGetAttribute", device))
      return err;
    if (pool != nullptr)
      return check(driver::set_pool_access(pool, access.data(), access.size()),
                   "cuMemPoolSetAccess", device);
    if (!is_mapped(address)) // of cudaMalloc: `enable_peer` gives access
      return {};
    CUdeviceptr begin = 0;
    std::size_t size = 0;
    if (auto err =
            check(driver::pointer_attribute(&begin, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address),
                  "cuPointerGetAttribute", device))
      return err;
    if (auto err = check(driver::pointer_attribute(&size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, address),
                         "cuPointerGetAttribute", device))
      return err;
    return check(driver::set_access(begin, size, access.data(), access.size()), "cuMemSetAccess",
                 device);
  });
}

} // namespace troupe::detail
