#include "actors/device_access.hpp"
#include "foundation/log.hpp"
#include "interop/lent_memory.hpp"
#include <troupe/detail/device_allocator.hpp>

#include <bit>
#include <cstdint>
#include <string>
#include <utility>

namespace troupe::detail {

namespace {

/// The least alignment of all memory of a device (`backend_device::allocate`).
constexpr std::size_t least_alignment = 256;

} // namespace

caf::expected<std::shared_ptr<device_allocator>> device_allocator::make(device on) {
  auto& core = device_access::core_of(on);
  if (auto& why = core.why_none(); why)
    return why;
  if (core.is_remote())
    return make_error({.code = errc::not_supported,
                       .detail = "the device lives in another process",
                       .device = on.ordinal()});
  return std::make_shared<device_allocator>(std::move(on));
}

device_allocator::~device_allocator() {
  if (!allocated_.empty())
    log(log_level::warning, "a memory resource of device " + std::to_string(on_.ordinal()) +
                                " ended before " + std::to_string(allocated_.size()) +
                                " of its allocations");
}

caf::expected<void*> device_allocator::allocate(std::size_t size_bytes, std::size_t alignment) {
  if (auto refused = check_may_block(); refused)
    return refused;
  if (!std::has_single_bit(alignment))
    return make_error(errc::invalid_argument,
                      "the alignment, " + std::to_string(alignment) + ", is not a power of 2");
  if (size_bytes == 0)
    return nullptr;
  const auto extra = alignment > least_alignment ? alignment - least_alignment : 0;
  if (size_bytes > SIZE_MAX - extra)
    return make_error(errc::out_of_memory, "the size of the allocation overflows");
  auto ref = on_.allocate(dtype::uint8, size_bytes + extra).wait();
  if (!ref)
    return ref.error();
  auto hold = lent_memory::take(on_, *ref);
  const auto address = reinterpret_cast<std::uintptr_t>(hold->address());
  auto* memory = reinterpret_cast<void*>((address + alignment - 1) & ~(alignment - 1));
  std::lock_guard lock{mutex_};
  allocated_.emplace(memory, std::move(hold));
  return memory;
}

void device_allocator::report_failed_wait(const char* cuda_error) noexcept {
  log(log_level::warning, std::string{"memory is freed, but the wait for the work of its stream "
                                      "failed with "} +
                              cuda_error);
}

void device_allocator::deallocate(void* memory, std::optional<CUstream_st*> stream) noexcept {
  if (memory == nullptr)
    return;
  decltype(allocated_)::node_type found;
  {
    std::lock_guard lock{mutex_};
    found = allocated_.extract(memory);
  }
  if (!found)
    return log(log_level::error, "a memory resource of device " + std::to_string(on_.ordinal()) +
                                     " was to free memory that it has not allocated");
  auto& hold = *found.mapped();
  auto error = hold.give_back(stream);
  if (error && !hold.ref().stale())
    log(log_level::warning, "memory was freed before the work of its stream was known to be over",
        error);
}

} // namespace troupe::detail
