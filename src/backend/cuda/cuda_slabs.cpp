#include "backend/cuda/cuda_slabs.hpp"

#include "backend/cuda/cuda_error.hpp"
#include "backend/cuda/device_guard.hpp"
#include "backend/cuda/driver_functions.hpp"

#include <cstdint>
#include <utility>

namespace troupe::detail {

namespace {

CUmemAllocationProp kind_on(int ordinal) {
  CUmemAllocationProp result{};
  result.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  result.location = {CU_MEM_LOCATION_TYPE_DEVICE, ordinal};
  result.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return result;
}

CUdeviceptr address_of(const memory_slab& what) noexcept {
  return static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(what.address));
}

/// Physical memory. It lives on while it is mapped, or while a descriptor of it is open.
class physical_memory {
public:
  physical_memory() = default;
  ~physical_memory() {
    if (handle_ != 0)
      teardown(driver::release_allocation(handle_), "cuMemRelease", device_);
  }
  physical_memory(const physical_memory&) = delete;
  physical_memory& operator=(const physical_memory&) = delete;

  caf::error make(const memory_slab& what) {
    device_ = what.ordinal;
    const auto kind = kind_on(what.ordinal);
    return check(driver::create_memory(&handle_, what.size_bytes, &kind, 0), "cuMemCreate",
                 device_);
  }

  caf::error import(const memory_slab& what, int descriptor) {
    device_ = what.ordinal;
    return check(driver::import_memory(
                     &handle_, reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor)),
                     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                 "cuMemImportFromShareableHandle", device_);
  }

  caf::expected<file_descriptor> descriptor() const {
    int result = -1;
    if (auto err = check(
            driver::export_memory(&result, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
            "cuMemExportToShareableHandle", device_))
      return err;
    return file_descriptor{result};
  }

  CUmemGenericAllocationHandle handle() const noexcept { return handle_; }

private:
  CUmemGenericAllocationHandle handle_ = 0;
  int device_ = -1;
};

/// Returns the addresses. @errors as `make_slab`
caf::error reserve(const memory_slab& what) {
  CUdeviceptr at = 0;
  if (auto err = check(driver::reserve_addresses(&at, what.size_bytes, 0, address_of(what), 0),
                       "cuMemAddressReserve", what.ordinal))
    return err;
  if (at == address_of(what))
    return {};
  if (auto err =
          check(driver::free_addresses(at, what.size_bytes), "cuMemAddressFree", what.ordinal))
    return err;
  return make_error({.code = errc::unavailable,
                     .detail = "the address of a slab is in use",
                     .device = what.ordinal});
}

/// Maps physical memory at the addresses of the slab, for work of device `by`.
caf::error map(const memory_slab& what, const physical_memory& memory, int by) {
  if (auto err = reserve(what))
    return err;
  auto err = check(driver::map_memory(address_of(what), what.size_bytes, 0, memory.handle(), 0),
                   "cuMemMap", what.ordinal);
  if (!err) {
    const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, by},
                                 CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    err = check(driver::set_access(address_of(what), what.size_bytes, &access, 1), "cuMemSetAccess",
                by);
    if (err)
      teardown(driver::unmap_memory(address_of(what), what.size_bytes), "cuMemUnmap", what.ordinal);
  }
  if (err)
    teardown(driver::free_addresses(address_of(what), what.size_bytes), "cuMemAddressFree",
             what.ordinal);
  return err;
}

} // namespace

std::size_t slab_granularity(int devices) noexcept {
  constexpr std::size_t most_known = std::size_t{2} << 20;
  for (int ordinal = 0; ordinal < devices; ++ordinal) {
    CUdevice device = 0;
    if (driver::get_device(&device, ordinal) != cudaSuccess)
      return 0;
    for (const auto what : {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                            CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED}) {
      int supported = 0;
      if (driver::get_attribute_of(&supported, what, device) != cudaSuccess || supported == 0)
        return 0;
    }
    const auto kind = kind_on(ordinal);
    std::size_t least = 0;
    if (driver::granularity(&least, &kind, CU_MEM_ALLOC_GRANULARITY_MINIMUM) != cudaSuccess ||
        least == 0 || most_known % least != 0)
      return 0;
  }
  return most_known;
}

caf::expected<file_descriptor> make_slab(const memory_slab& what) noexcept {
  return no_throw([&]() -> caf::expected<file_descriptor> {
    const device_guard guard{what.ordinal};
    if (auto err = check(guard.error(), "cuCtxPushCurrent", what.ordinal))
      return err;
    physical_memory memory;
    if (auto err = memory.make(what))
      return err;
    auto descriptor = memory.descriptor();
    if (!descriptor)
      return descriptor;
    if (auto err = map(what, memory, what.ordinal))
      return err;
    return descriptor;
  });
}

caf::error map_slab(const memory_slab& what, int descriptor, int by) noexcept {
  return no_throw([&]() -> caf::error {
    const device_guard guard{by};
    if (auto err = check(guard.error(), "cuCtxPushCurrent", by))
      return err;
    physical_memory memory;
    if (auto err = memory.import(what, descriptor))
      return err;
    return map(what, memory, by);
  });
}

/// Needs no context: that of another process's device is not made for it.
caf::error unmap_slab(const memory_slab& what) noexcept {
  if (auto err = check(driver::unmap_memory(address_of(what), what.size_bytes), "cuMemUnmap",
                       what.ordinal))
    return err;
  return check(driver::free_addresses(address_of(what), what.size_bytes), "cuMemAddressFree",
               what.ordinal);
}

} // namespace troupe::detail
