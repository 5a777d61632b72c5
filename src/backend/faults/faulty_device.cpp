#include "backend/faults/faulty_device.hpp"

#include <troupe/error.hpp>
#include <troupe/testing/fault_plan.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace troupe::detail {

namespace {

using testing::fault;
using testing::verb;

class faulty_device final : public backend_device {
public:
  faulty_device(std::unique_ptr<backend_device> inner, std::shared_ptr<fault_injector> injector,
                std::shared_ptr<open_devices> devices, int ordinal)
      : injector_(std::move(injector)), devices_(std::move(devices)), ordinal_(ordinal),
        inner_(std::move(inner)) {
    if (inner_->is_remote())
      words_.emplace(*inner_);
    std::lock_guard lock{devices_->mutex};
    devices_->by_ordinal[ordinal_] = here();
  }

  ~faulty_device() override {
    injector_->remove_signal(this);
    {
      std::lock_guard lock{devices_->mutex};
      devices_->by_ordinal.erase(ordinal_);
    }
    open_gates();
  }

  caf::error bind() noexcept override {
    if (inner_->is_remote() && inner_->loss())
      open_gates(); // their streams are gone
    return call(verb::bind, [this] { return inner_->bind(); });
  }

  caf::expected<device_properties> properties() noexcept override {
    return unless_poisoned("properties", [&] { return inner_->properties(); });
  }

  caf::expected<memory_info> memory() noexcept override {
    return unless_poisoned("memory", [&] { return inner_->memory(); });
  }

  caf::error open_memory() noexcept override {
    return call(verb::open_memory, [this] { return inner_->open_memory(); });
  }

  caf::error close_memory() noexcept override {
    return call(verb::close_memory, [this] { return inner_->close_memory(); });
  }

  caf::expected<void*> allocate(std::size_t size_bytes, stream_view stream) noexcept override {
    return call(verb::allocate, [&] { return inner_->allocate(size_bytes, stream); });
  }

  caf::error deallocate(void* memory, stream_view stream) noexcept override {
    return call(verb::deallocate, [&] { return inner_->deallocate(memory, stream); }, stream);
  }

  caf::expected<void*> allocate_pinned(std::size_t size_bytes) noexcept override {
    return call(verb::allocate_pinned, [&] { return inner_->allocate_pinned(size_bytes); });
  }

  /// Injects no fault: host memory can be freed whatever the state of the devices.
  caf::error deallocate_pinned(void* memory) noexcept override {
    return inner_->deallocate_pinned(memory);
  }

  std::function<caf::error(void*)> pinned_deleter() noexcept override {
    return inner_->pinned_deleter();
  }

  caf::expected<stream_view> create_stream() noexcept override {
    return call(verb::create_stream, [this] { return inner_->create_stream(); });
  }

  caf::error destroy_stream(stream_view stream) noexcept override {
    return unless_poisoned("destroy_stream", [&] { return inner_->destroy_stream(stream); });
  }

  caf::expected<event_view> create_event() noexcept override {
    return call(verb::create_event, [this] { return inner_->create_event(); });
  }

  caf::error destroy_event(event_view event) noexcept override {
    return unless_poisoned("destroy_event", [&] { return inner_->destroy_event(event); });
  }

  caf::error record(event_view event, stream_view stream) noexcept override {
    return call(verb::record, [&] { return inner_->record(event, stream); }, stream);
  }

  caf::expected<user_event> record_user(stream_view user) noexcept override {
    return call(verb::record, [&] { return inner_->record_user(user); }, user);
  }

  caf::error wait(stream_view stream, event_view event) noexcept override {
    return call(verb::wait, [&] { return inner_->wait(stream, event); }, stream);
  }

  caf::expected<bool> query(event_view event) noexcept override {
    return call(verb::query, [&] { return inner_->query(event); });
  }

  caf::error synchronize(event_view event) noexcept override {
    return call(verb::synchronize, [&] {
      auto err = inner_->synchronize(event);
      return injector_->poisoned() ? fault_injector::sticky_error("synchronize", {ordinal_}) : err;
    });
  }

  caf::error copy(void* target, const void* source, std::size_t size_bytes,
                  copy_direction direction, stream_view stream) noexcept override {
    return call_copy(
        verb::copy, {ordinal_}, size_bytes,
        [&](std::size_t begin, std::size_t size) {
          return inner_->copy(static_cast<std::byte*>(target) + begin,
                              static_cast<const std::byte*>(source) + begin, size, direction,
                              stream);
        },
        stream);
  }

  caf::error fill(void* target, std::span<const std::byte> pattern, std::size_t count,
                  stream_view stream) noexcept override {
    return call(verb::fill, [&] { return inner_->fill(target, pattern, count, stream); }, stream);
  }

  caf::error launch_host(stream_view stream, void (*function)(void*),
                         void* argument) noexcept override {
    return call(
        verb::launch_host, [&] { return inner_->launch_host(stream, function, argument); }, stream);
  }

  caf::error clear_last_error(std::string_view found, std::string_view call,
                              std::uint64_t number) noexcept override {
    return inner_->clear_last_error(found, call, number);
  }

  caf::expected<bool> can_access_peer(int peer) noexcept override {
    return unless_poisoned("can_access_peer", [&] { return inner_->can_access_peer(peer); });
  }

  caf::error enable_peer(int peer) noexcept override {
    return call(verb::enable_peer, [&] { return inner_->enable_peer(peer); }, {}, peer);
  }

  caf::error admit_peer(int peer) noexcept override {
    return call(verb::admit_peer, [&] { return inner_->admit_peer(peer); }, {}, peer);
  }

  caf::error copy_peer(void* target, int target_device, const void* source, int source_device,
                       std::size_t size_bytes, stream_view stream) noexcept override {
    const auto peer = target_device == ordinal_ ? source_device : target_device;
    return call_copy(
        verb::copy_peer, {ordinal_, -1, nullptr, peer}, size_bytes,
        [&](std::size_t begin, std::size_t size) {
          return inner_->copy_peer(static_cast<std::byte*>(target) + begin, target_device,
                                   static_cast<const std::byte*>(source) + begin, source_device,
                                   size, stream);
        },
        stream);
  }

  /// False while rules concern copies, since a rule applies to each copy alone.
  bool prefers_copy_peers() const noexcept override {
    return inner_->prefers_copy_peers() && !injector_->concerns(verb::copy_peer);
  }

  caf::error copy_peers(std::span<const peer_copy> copies, stream_view stream) noexcept override {
    if (injector_->concerns(verb::copy_peer))
      return make_error(errc::not_supported, "the fault plan injects into single copies");
    return inner_->copy_peers(copies, stream);
  }

  caf::error register_pinned(void* memory, std::size_t size_bytes) noexcept override {
    return inner_->register_pinned(memory, size_bytes);
  }

  caf::error unregister_pinned(void* memory) noexcept override {
    return inner_->unregister_pinned(memory);
  }

  caf::error wait_word(stream_view stream, const std::atomic<std::uint64_t>* word,
                       std::uint64_t value) noexcept override {
    if (injector_->poisoned())
      return fault_injector::sticky_error("wait_word", {ordinal_});
    return call(verb::wait, [&] { return inner_->wait_word(stream, word, value); }, stream);
  }

  event_word word_of(event_view event) const noexcept override { return inner_->word_of(event); }

  void interrupt() noexcept override { inner_->interrupt(); }
  bool is_remote() const noexcept override { return inner_->is_remote(); }

  caf::error launch_registered(const registered_call& what, stream_view stream) noexcept override {
    return call(verb::launch_host, [&] { return inner_->launch_registered(what, stream); }, stream);
  }
  caf::error prepare_registered(const registered_call& what, stream_view stream) noexcept override {
    return inner_->prepare_registered(what, stream);
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
    injector_->set_signal(this, signal);
    inner_->set_completion_signal(std::move(signal));
  }

private:
  open_device here() noexcept { return {inner_.get(), words_ ? &*words_ : nullptr}; }

  void open_gates() noexcept {
    injector_->open_gates([this](const gate& x) { return x.device == inner_.get(); });
  }

  /// Calls `f` unless a fault makes the call fail. With a `stream`, a gate blocks the stream, not
  /// the thread.
  template <class F>
  std::invoke_result_t<F> call(verb v, F f, stream_view stream = {},
                               int peer = testing::any_device) noexcept {
    const caller who{ordinal_, -1, nullptr, peer};
    if (auto what = injector_->next(v, who))
      if (auto err = suffer(*injector_, *what, v, who, here(), stream))
        return err;
    return f();
  }

  /// Calls `f`, which no rule concerns.
  template <class F> std::invoke_result_t<F> unless_poisoned(std::string_view name, F f) noexcept {
    if (injector_->poisoned())
      return fault_injector::sticky_error(name, {ordinal_});
    return f();
  }

  /// Same for a copy. `piece(begin, size)` copies part of it; `fault::corrupt` leaves out one byte.
  template <class F>
  caf::error call_copy(verb v, const caller& who, std::size_t size_bytes, F piece,
                       stream_view stream) noexcept {
    auto what = injector_->next(v, who);
    if (!what)
      return piece(0, size_bytes);
    if (what->kind != fault::corrupt) {
      if (auto err = suffer(*injector_, *what, v, who, here(), stream))
        return err;
      return piece(0, size_bytes);
    }
    if (size_bytes == 0)
      return {};
    const auto lost = static_cast<std::size_t>(what->where * static_cast<double>(size_bytes));
    if (auto err = piece(0, lost))
      return err;
    return piece(lost + 1, size_bytes - lost - 1);
  }

  std::shared_ptr<fault_injector> injector_;
  std::shared_ptr<open_devices> devices_;
  int ordinal_;
  std::unique_ptr<backend_device> inner_; // its streams may still reach gates
  std::optional<gate_words> words_; // destroyed first, since it frees its memory through the device
};

} // namespace

std::unique_ptr<backend_device> make_faulty_device(std::unique_ptr<backend_device> inner,
                                                   std::shared_ptr<fault_injector> injector,
                                                   std::shared_ptr<open_devices> devices,
                                                   int ordinal) {
  return std::make_unique<faulty_device>(std::move(inner), std::move(injector), std::move(devices),
                                         ordinal);
}

} // namespace troupe::detail
