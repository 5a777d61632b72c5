/// The device of a worker, as its programs see it.
#pragma once

#include "foundation/forwarding_device.hpp"
#include "worker/child/guest_memory.hpp"
#include <troupe/backend.hpp>

#include <memory>
#include <span>
#include <utility>

namespace troupe::detail {

/// Forwards to a device of the process, except for memory, which the parent lends.
class guest_device final : public forwarding_device {
public:
  guest_device(std::unique_ptr<backend_device> inner, std::shared_ptr<guest_memory> memory)
      : forwarding_device(std::move(inner)), memory_(std::move(memory)) {}

  caf::expected<memory_info> memory() noexcept override;
  /// Does nothing: the memory of the process's own pool is not used.
  caf::error open_memory() noexcept override { return {}; }
  caf::error close_memory() noexcept override;
  caf::expected<void*> allocate(std::size_t size_bytes, stream_view stream) noexcept override;
  caf::error deallocate(void* memory, stream_view stream) noexcept override;

  caf::error bind() noexcept override;
  caf::error copy_peers(std::span<const peer_copy> copies, stream_view stream) noexcept override {
    return inner_->copy_peers(copies, stream);
  }

private:
  const std::shared_ptr<guest_memory> memory_;
  std::size_t device_bytes_ = 0; ///< set by `bind`
};

} // namespace troupe::detail
