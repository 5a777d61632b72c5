/// The device of a worker, as its programs see it.
#pragma once

#include "worker/child/guest_memory.hpp"
#include <troupe/backend.hpp>

#include <memory>
#include <string_view>
#include <utility>

namespace troupe::detail {

/// Forwards to a device of the process, except for memory, which the parent lends.
class guest_device final : public backend_device {
public:
  guest_device(std::unique_ptr<backend_device> inner, std::shared_ptr<guest_memory> memory)
      : inner_(std::move(inner)), memory_(std::move(memory)) {}

  caf::expected<memory_info> memory() noexcept override;
  /// Does nothing: the memory of the process's own pool is not used.
  caf::error open_memory() noexcept override { return {}; }
  caf::error close_memory() noexcept override;
  caf::expected<void*> allocate(std::size_t size_bytes, stream_view stream) noexcept override;
  caf::error deallocate(void* memory, stream_view stream) noexcept override;

  caf::error bind() noexcept override;
  caf::expected<device_properties> properties() noexcept override { return inner_->properties(); }
  caf::expected<void*> allocate_pinned(std::size_t size_bytes) noexcept override {
    return inner_->allocate_pinned(size_bytes);
  }
  caf::error deallocate_pinned(void* memory) noexcept override {
    return inner_->deallocate_pinned(memory);
  }
  std::function<caf::error(void*)> pinned_deleter() noexcept override {
    return inner_->pinned_deleter();
  }
  caf::expected<stream_view> create_stream() noexcept override { return inner_->create_stream(); }
  caf::error destroy_stream(stream_view stream) noexcept override {
    return inner_->destroy_stream(stream);
  }
  caf::expected<event_view> create_event() noexcept override { return inner_->create_event(); }
  caf::error destroy_event(event_view event) noexcept override {
    return inner_->destroy_event(event);
  }
  caf::error record(event_view event, stream_view stream) noexcept override {
    return inner_->record(event, stream);
  }
  caf::expected<user_event> record_user(stream_view user) noexcept override {
    return inner_->record_user(user);
  }
  caf::error wait(stream_view stream, event_view event) noexcept override {
    return inner_->wait(stream, event);
  }
  caf::expected<bool> query(event_view event) noexcept override { return inner_->query(event); }
  caf::error synchronize(event_view event) noexcept override { return inner_->synchronize(event); }
  caf::error copy(void* target, const void* source, std::size_t size_bytes,
                  copy_direction direction, stream_view stream) noexcept override {
    return inner_->copy(target, source, size_bytes, direction, stream);
  }
  caf::error fill(void* target, std::span<const std::byte> pattern, std::size_t count,
                  stream_view stream) noexcept override {
    return inner_->fill(target, pattern, count, stream);
  }
  caf::error launch_host(stream_view stream, void (*function)(void*),
                         void* argument) noexcept override {
    return inner_->launch_host(stream, function, argument);
  }
  caf::error clear_last_error(std::string_view found, std::string_view call,
                              std::uint64_t number) noexcept override {
    return inner_->clear_last_error(found, call, number);
  }
  caf::expected<bool> can_access_peer(int peer) noexcept override {
    return inner_->can_access_peer(peer);
  }
  caf::error enable_peer(int peer) noexcept override { return inner_->enable_peer(peer); }
  caf::error admit_peer(int peer) noexcept override { return inner_->admit_peer(peer); }
  caf::error copy_peer(void* target, int target_device, const void* source, int source_device,
                       std::size_t size_bytes, stream_view stream) noexcept override {
    return inner_->copy_peer(target, target_device, source, source_device, size_bytes, stream);
  }
  caf::error copy_peers(std::span<const peer_copy> copies, stream_view stream) noexcept override {
    return inner_->copy_peers(copies, stream);
  }
  bool prefers_copy_peers() const noexcept override { return inner_->prefers_copy_peers(); }
  caf::error register_pinned(void* memory, std::size_t size_bytes) noexcept override {
    return inner_->register_pinned(memory, size_bytes);
  }
  caf::error unregister_pinned(void* memory) noexcept override {
    return inner_->unregister_pinned(memory);
  }
  caf::error wait_word(stream_view stream, const std::atomic<std::uint64_t>* word,
                       std::uint64_t value) noexcept override {
    return inner_->wait_word(stream, word, value);
  }
  void interrupt() noexcept override { inner_->interrupt(); }
  bool runs_cuda() const noexcept override { return inner_->runs_cuda(); }
  bool signals_completion() const noexcept override { return inner_->signals_completion(); }
  void set_completion_signal(std::function<void()> signal) noexcept override {
    inner_->set_completion_signal(std::move(signal));
  }

private:
  const std::unique_ptr<backend_device> inner_;
  const std::shared_ptr<guest_memory> memory_;
  std::size_t device_bytes_ = 0; ///< set by `bind`
};

} // namespace troupe::detail
