#include "worker/child/guest_device.hpp"

#include <algorithm>

namespace troupe::detail {

caf::error guest_device::bind() noexcept {
  if (auto error = inner_->bind())
    return error;
  const auto properties = inner_->properties();
  if (!properties)
    return properties.error();
  device_bytes_ = properties->total_bytes;
  return {};
}

caf::expected<memory_info> guest_device::memory() noexcept {
  auto result = inner_->memory();
  if (result)
    result->free_bytes = std::min(result->free_bytes + memory_->free_bytes(), result->total_bytes);
  return result;
}

caf::error guest_device::close_memory() noexcept {
  memory_->clear();
  return {};
}

caf::expected<void*> guest_device::allocate(std::size_t size_bytes, stream_view) noexcept {
  return memory_->allocate(size_bytes, device_bytes_);
}

caf::error guest_device::deallocate(void* memory, stream_view) noexcept {
  if (memory_->deallocate(memory))
    return {};
  return make_error(errc::invalid_argument, "this memory is not allocated here");
}

} // namespace troupe::detail
