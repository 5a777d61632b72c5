/// A device that forwards every call to another one. Derived classes override single functions.
#pragma once

#include <troupe/backend.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace troupe::detail {

class forwarding_device : public backend_device {
public:
  explicit forwarding_device(std::unique_ptr<backend_device> inner) : inner_(std::move(inner)) {}

  caf::error bind() noexcept override { return inner_->bind(); }
  caf::expected<device_properties> properties() noexcept override { return inner_->properties(); }
  caf::expected<memory_info> memory() noexcept override { return inner_->memory(); }
  caf::error open_memory() noexcept override { return inner_->open_memory(); }
  caf::error close_memory() noexcept override { return inner_->close_memory(); }
  caf::expected<void*> allocate(std::size_t size_bytes, stream_view stream) noexcept override {
    return inner_->allocate(size_bytes, stream);
  }
  caf::error deallocate(void* memory, stream_view stream) noexcept override {
    return inner_->deallocate(memory, stream);
  }
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
  caf::error destroy_stream(stream_view x) noexcept override { return inner_->destroy_stream(x); }
  caf::expected<event_view> create_event() noexcept override { return inner_->create_event(); }
  caf::error destroy_event(event_view x) noexcept override { return inner_->destroy_event(x); }
  caf::error record(event_view x, stream_view on) noexcept override {
    return inner_->record(x, on);
  }
  caf::expected<user_event> record_user(stream_view on) noexcept override {
    return inner_->record_user(on);
  }
  caf::error wait(stream_view on, event_view x) noexcept override { return inner_->wait(on, x); }
  caf::expected<bool> query(event_view x) noexcept override { return inner_->query(x); }
  caf::error synchronize(event_view x) noexcept override { return inner_->synchronize(x); }
  caf::error copy(void* to, const void* from, std::size_t size_bytes, copy_direction direction,
                  stream_view on) noexcept override {
    return inner_->copy(to, from, size_bytes, direction, on);
  }
  caf::error fill(void* to, std::span<const std::byte> pattern, std::size_t count,
                  stream_view on) noexcept override {
    return inner_->fill(to, pattern, count, on);
  }
  caf::error launch_host(stream_view on, void (*f)(void*), void* x) noexcept override {
    return inner_->launch_host(on, f, x);
  }
  bool records_graphs() const noexcept override { return inner_->records_graphs(); }
  caf::expected<graph_view>
  record_graph(stream_view on, const std::function<caf::error()>& enqueue) noexcept override {
    return inner_->record_graph(on, enqueue);
  }
  caf::error launch_graph(graph_view x, stream_view on) noexcept override {
    return inner_->launch_graph(x, on);
  }
  caf::error drop_graph(graph_view x) noexcept override { return inner_->drop_graph(x); }
  std::uint64_t workspace_changes() const noexcept override { return inner_->workspace_changes(); }
  caf::error clear_last_error(std::string_view found, std::string_view what,
                              std::uint64_t number) noexcept override {
    return inner_->clear_last_error(found, what, number);
  }
  caf::expected<bool> can_access_peer(int peer) noexcept override {
    return inner_->can_access_peer(peer);
  }
  caf::error enable_peer(int peer) noexcept override { return inner_->enable_peer(peer); }
  caf::error admit_peer(int peer) noexcept override { return inner_->admit_peer(peer); }
  bool prefers_copy_peers() const noexcept override { return inner_->prefers_copy_peers(); }
  caf::error copy_peer(void* to, int to_device, const void* from, int from_device,
                       std::size_t size_bytes, stream_view on) noexcept override {
    return inner_->copy_peer(to, to_device, from, from_device, size_bytes, on);
  }
  caf::error register_pinned(void* memory, std::size_t size_bytes) noexcept override {
    return inner_->register_pinned(memory, size_bytes);
  }
  caf::error unregister_pinned(void* memory) noexcept override {
    return inner_->unregister_pinned(memory);
  }
  caf::error wait_word(stream_view on, const std::atomic<std::uint64_t>* word,
                       std::uint64_t value) noexcept override {
    return inner_->wait_word(on, word, value);
  }
  event_word word_of(event_view x) const noexcept override { return inner_->word_of(x); }
  void interrupt() noexcept override { inner_->interrupt(); }
  bool is_remote() const noexcept override { return inner_->is_remote(); }
  caf::error launch_registered(const registered_call& what, stream_view on) noexcept override {
    return inner_->launch_registered(what, on);
  }
  caf::error prepare_registered(const registered_call& what, stream_view on) noexcept override {
    return inner_->prepare_registered(what, on);
  }
  void set_loss_signal(std::function<void(const caf::error&)> signal) noexcept override {
    inner_->set_loss_signal(std::move(signal));
  }
  caf::error loss() const noexcept override { return inner_->loss(); }
  bool may_keep_memory(const caf::error& loss) const noexcept override {
    return inner_->may_keep_memory(loss);
  }
  std::function<bool()> lost_work() const noexcept override { return inner_->lost_work(); }
  caf::error take_over() noexcept override { return inner_->take_over(); }
  caf::error move_to_spare() noexcept override { return inner_->move_to_spare(); }
  bool runs_cuda() const noexcept override { return inner_->runs_cuda(); }
  bool signals_completion() const noexcept override { return inner_->signals_completion(); }
  void set_completion_signal(std::function<void()> signal) noexcept override {
    inner_->set_completion_signal(std::move(signal));
  }

protected:
  std::unique_ptr<backend_device> inner_;
};

} // namespace troupe::detail
