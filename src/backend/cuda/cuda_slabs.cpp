#include "backend/cuda/cuda_slabs.hpp"

#include "backend/cuda/cuda_error.hpp"
#include "backend/cuda/device_guard.hpp"
#include "backend/cuda/driver_functions.hpp"
#include "foundation/log.hpp"

#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace troupe::detail {

namespace {

/// The driver's granularity is the same or divides it (`slab_granularity`).
constexpr std::size_t slab_unit = std::size_t{2} << 20;

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

caf::error refusal(errc code, const memory_slab& what, std::string detail) {
  return make_error({.code = code, .detail = std::move(detail), .device = what.ordinal});
}

/// The addresses of the slabs that this process has mapped. They are reserved in whole windows: the
/// driver may put a small reservation elsewhere, where it has room already.
/// @thread any
class slab_addresses_here {
public:
  /// @errors as `make_slab`
  caf::error take(const memory_slab& what) {
    const auto begin = address_of(what);
    const auto end = begin + what.size_bytes;
    if (begin == 0 || what.size_bytes == 0 || begin % slab_unit != 0 ||
        what.size_bytes % slab_unit != 0 || window_of(begin) != window_of(end - 1))
      return refusal(errc::invalid_argument, what,
                     "a slab does not lie within a window, or is no multiple of " +
                         std::to_string(slab_unit) + " bytes");
    const std::lock_guard lock{mutex_};
    const auto next = taken_.lower_bound(end);
    if (next != taken_.begin() && std::prev(next)->second > begin)
      return refusal(errc::unavailable, what, "the address of a slab is in use");
    auto& slabs = slabs_in_[window_of(begin)];
    if (slabs == 0)
      if (auto err = reserve(window_of(begin), what))
        return err;
    ++slabs;
    taken_.emplace(begin, end);
    return {};
  }

  bool has(const memory_slab& what) {
    const std::lock_guard lock{mutex_};
    const auto found = taken_.find(address_of(what));
    return found != taken_.end() && found->second == address_of(what) + what.size_bytes;
  }

  /// Gives back what `take` took, and is not mapped.
  caf::error give_back(const memory_slab& what) {
    const auto window = window_of(address_of(what));
    const std::lock_guard lock{mutex_};
    taken_.erase(address_of(what));
    if (--slabs_in_[window] != 0)
      return {};
    return check(driver::free_addresses(window, memory_slab::window), "cuMemAddressFree",
                 what.ordinal);
  }

private:
  static constexpr CUdeviceptr window_of(CUdeviceptr x) noexcept {
    return x / memory_slab::window * memory_slab::window;
  }

  static caf::error reserve(CUdeviceptr window, const memory_slab& what) {
    CUdeviceptr at = 0;
    if (auto err = check(driver::reserve_addresses(&at, memory_slab::window, 0, window, 0),
                         "cuMemAddressReserve", what.ordinal))
      return err;
    if (at == window)
      return {};
    if (auto err = check(driver::free_addresses(at, memory_slab::window), "cuMemAddressFree",
                         what.ordinal))
      return err;
    return refusal(errc::unavailable, what, "the address of a slab is in use");
  }

  std::mutex mutex_;
  std::map<CUdeviceptr, CUdeviceptr> taken_;    ///< begin to end
  std::map<CUdeviceptr, std::size_t> slabs_in_; ///< by window; not 0: it is reserved
};

slab_addresses_here& addresses() {
  static auto& all = *new slab_addresses_here; // never destroyed: threads may use it at exit
  return all;
}

/// Maps physical memory at the addresses of the slab, for work of device `by`.
caf::error map(const memory_slab& what, const physical_memory& memory, int by) {
  if (auto err = check(driver::map_memory(address_of(what), what.size_bytes, 0, memory.handle(), 0),
                       "cuMemMap", what.ordinal))
    return err;
  const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, by},
                               CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  auto err = check(driver::set_access(address_of(what), what.size_bytes, &access, 1),
                   "cuMemSetAccess", by);
  if (err)
    teardown(driver::unmap_memory(address_of(what), what.size_bytes), "cuMemUnmap", what.ordinal);
  return err;
}

/// Calls `f` with the addresses of the slab taken. Gives them back if it fails.
template <class F> caf::error with_addresses(const memory_slab& what, F f) {
  if (auto err = addresses().take(what))
    return err;
  auto err = f();
  if (err)
    if (auto failed = addresses().give_back(what))
      log(log_level::warning, "the addresses of a slab were not given back", failed);
  return err;
}

} // namespace

std::size_t slab_granularity(int devices) noexcept {
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
        least == 0 || slab_unit % least != 0)
      return 0;
  }
  return slab_unit;
}

caf::expected<file_descriptor> make_slab(const memory_slab& what) noexcept {
  return no_throw([&]() -> caf::expected<file_descriptor> {
    const device_guard guard{what.ordinal};
    if (auto err = check(guard.error(), "cuCtxPushCurrent", what.ordinal))
      return err;
    file_descriptor result;
    auto err = with_addresses(what, [&]() -> caf::error {
      physical_memory memory;
      if (auto failed = memory.make(what))
        return failed;
      auto descriptor = memory.descriptor();
      if (!descriptor)
        return descriptor.error();
      result = std::move(*descriptor);
      return map(what, memory, what.ordinal);
    });
    if (err)
      return err;
    return result;
  });
}

caf::error map_slab(const memory_slab& what, int descriptor, int by) noexcept {
  return no_throw([&]() -> caf::error {
    const device_guard guard{by};
    if (auto err = check(guard.error(), "cuCtxPushCurrent", by))
      return err;
    return with_addresses(what, [&]() -> caf::error {
      physical_memory memory;
      if (auto failed = memory.import(what, descriptor))
        return failed;
      return map(what, memory, by);
    });
  });
}

/// Needs no context: that of another process's device is not made for it.
caf::error unmap_slab(const memory_slab& what) noexcept {
  return no_throw([&]() -> caf::error {
    if (!addresses().has(what))
      return refusal(errc::invalid_argument, what, "there is no such slab");
    if (auto err = check(driver::unmap_memory(address_of(what), what.size_bytes), "cuMemUnmap",
                         what.ordinal))
      return err;
    return addresses().give_back(what);
  });
}

} // namespace troupe::detail
