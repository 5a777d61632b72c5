/// Backends that forward every call to another one. Tests override single functions.
#pragma once

#include <troupe/backend.hpp>

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

namespace troupe::testing {

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
  caf::error launch_registered(const std::string& name, std::span<const launch_memory> reads,
                               std::span<const launch_memory> writes,
                               std::span<const std::byte> arguments,
                               stream_view on) noexcept override {
    return inner_->launch_registered(name, reads, writes, arguments, on);
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

class forwarding_backend : public backend {
public:
  explicit forwarding_backend(std::shared_ptr<backend> inner) : inner_(std::move(inner)) {}

  std::string_view name() const noexcept override { return inner_->name(); }
  int device_count() const noexcept override { return inner_->device_count(); }
  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override {
    return inner_->open(ordinal);
  }
  caf::expected<std::unique_ptr<backend_device>> open_beside(int ordinal) noexcept override {
    return inner_->open_beside(ordinal);
  }
  caf::expected<peer_link> link(int from, int to) noexcept override {
    return inner_->link(from, to);
  }
  void call_off(const communicator_id& id) noexcept override { inner_->call_off(id); }
  caf::expected<communicator_id> make_communicator_id() noexcept override {
    return inner_->make_communicator_id();
  }
  bool shares_adopted_memory() const noexcept override { return inner_->shares_adopted_memory(); }
  std::shared_ptr<const void> keep_for_peers(int ordinal, const void* memory,
                                             std::size_t size_bytes) noexcept override {
    return inner_->keep_for_peers(ordinal, memory, size_bytes);
  }
  std::shared_ptr<const shared_word> take_word(int ordinal, std::uint64_t value) noexcept override {
    return inner_->take_word(ordinal, value);
  }
  std::atomic<std::uint64_t>* find_word(std::uint32_t number) noexcept override {
    return inner_->find_word(number);
  }
  caf::error admit_memory(int ordinal, void* memory, std::size_t size_bytes) noexcept override {
    return inner_->admit_memory(ordinal, memory, size_bytes);
  }
  std::size_t slab_granularity() const noexcept override { return inner_->slab_granularity(); }
  caf::expected<int> make_slab(const memory_slab& what) noexcept override {
    return inner_->make_slab(what);
  }
  caf::error map_slab(const memory_slab& what, int descriptor, int by) noexcept override {
    return inner_->map_slab(what, descriptor, by);
  }
  caf::error unmap_slab(const memory_slab& what) noexcept override {
    return inner_->unmap_slab(what);
  }
  bool can_be_direct(std::span<const int> ordinals) const noexcept override {
    return inner_->can_be_direct(ordinals);
  }
  caf::expected<communicator_ranks>
  build_direct(std::span<const local_rank> ranks) noexcept override {
    return inner_->build_direct(ranks);
  }
  caf::expected<communicator_ranks> build(const communicator_id& id, int size,
                                          std::span<const local_rank> ranks) noexcept override {
    return inner_->build(id, size, ranks);
  }
  caf::error abort(communicator_ranks ranks) noexcept override {
    return inner_->abort(std::move(ranks));
  }
  caf::error destroy(communicator_ranks ranks) noexcept override {
    return inner_->destroy(std::move(ranks));
  }
  caf::error provide_spare(int ordinal) noexcept override { return inner_->provide_spare(ordinal); }
  caf::error prepare_move(int ordinal) noexcept override { return inner_->prepare_move(ordinal); }
  bool is_current(const backend_communicator& rank, int ordinal) const noexcept override {
    return inner_->is_current(rank, ordinal);
  }
  bool give_up(int ordinal, const caf::error& why) noexcept override {
    return inner_->give_up(ordinal, why);
  }
  void abandon(const caf::error& why) noexcept override { inner_->abandon(why); }
  caf::error tell(int ordinal, std::span<const std::byte> what) noexcept override {
    return inner_->tell(ordinal, what);
  }
  void set_listener(
      std::function<void(int ordinal, std::span<const std::byte> what)> f) noexcept override {
    inner_->set_listener(std::move(f));
  }

protected:
  /// Opens a device of the other backend and wraps it in a `Device`.
  template <class Device, class... Args>
  caf::expected<std::unique_ptr<backend_device>> open_as(int ordinal, Args&&... args) {
    auto device = inner_->open(ordinal);
    if (!device)
      return std::move(device.error());
    return std::unique_ptr<backend_device>{
        std::make_unique<Device>(std::move(*device), std::forward<Args>(args)...)};
  }

  const std::shared_ptr<backend> inner_;
};

} // namespace troupe::testing
