/// Backends that forward every call to another one. Tests override single functions.
#pragma once

#include "foundation/forwarding_device.hpp"
#include <troupe/backend.hpp>

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

namespace troupe::testing {

using detail::forwarding_device;

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
  std::size_t direct_bytes() const noexcept override { return inner_->direct_bytes(); }
  caf::expected<communicator_id> make_direct_id() noexcept override {
    return inner_->make_direct_id();
  }
  caf::expected<communicator_ranks>
  join_direct(const communicator_id& id, int rank,
              std::span<const direct_member> members) noexcept override {
    return inner_->join_direct(id, rank, members);
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
