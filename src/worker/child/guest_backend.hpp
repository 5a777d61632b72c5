/// The device of a worker as its own program sees it. The parent drives the same device.
#pragma once

#include "worker/protocol/protocol.hpp"
#include <troupe/backend.hpp>

#include <functional>
#include <memory>
#include <mutex>
#include <span>

namespace troupe::detail {

/// Serializes calls of two threads on communicators of one device.
struct shared_device {
  std::mutex driving;
};

struct guest_options {
  int device = 0; ///< ordinal of the worker's only device
  std::shared_ptr<backend> executes;
  std::shared_ptr<shared_device> with;
  /// Called when nothing is left of the rank that the parent knows by this key.
  std::function<void(communicator_key)> on_gone;
  /// Called when this process's work on the device is lost.
  std::function<void(const caf::error&)> on_fault;
  /// Sends bytes to the parent. @thread any
  std::function<caf::error(std::span<const std::byte>)> tell;
};

class guest_backend final : public backend {
public:
  explicit guest_backend(guest_options options) : options_(std::move(options)) {}

  /// Wraps a rank as a communicator of this backend.
  communicator_ranks adopt(communicator_key key, communicator_ranks rank) const;

  std::string_view name() const noexcept override { return options_.executes->name(); }
  int device_count() const noexcept override { return options_.executes->device_count(); }
  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override;
  /// Returns false: the parent supervises the device.
  bool allows_reset() const noexcept override { return false; }
  caf::expected<peer_link> link(int from, int to) noexcept override;
  /// Fails, as `build` does: the parent builds the communicators.
  caf::expected<communicator_id> make_communicator_id() noexcept override;
  caf::expected<communicator_ranks> build(const communicator_id& id, int size,
                                          std::span<const local_rank> ranks) noexcept override;
  caf::error abort(communicator_ranks ranks) noexcept override;
  caf::error destroy(communicator_ranks ranks) noexcept override;
  /// Sends bytes to the parent.
  caf::error tell(int ordinal, std::span<const std::byte> what) noexcept override;
  void set_listener(std::function<void(int, std::span<const std::byte>)> f) noexcept override;
  /// Passes bytes from the parent to the listener.
  void received(std::span<const std::byte> what) const;
  void abandon(const caf::error& why) noexcept override;

private:
  template <class F> caf::error end(communicator_ranks ranks, F f) noexcept;

  const guest_options options_;
  mutable std::mutex listener_mutex_;
  std::function<void(int, std::span<const std::byte>)> listener_;
};

} // namespace troupe::detail
