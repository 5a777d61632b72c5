/// The device of a worker as the worker's own program has it: beside the one that the parent
/// drives.
#pragma once

#include "worker/protocol.hpp"
#include <troupe/backend.hpp>

#include <functional>
#include <memory>
#include <mutex>
#include <span>

namespace troupe::detail {

/// No two threads make calls on communicators of one device at the same time.
struct shared_device {
  std::mutex driving;
};

struct guest_options {
  int device = 0; ///< the one that there is; its ordinal
  std::shared_ptr<backend> executes;
  std::shared_ptr<shared_device> with;
  /// Nothing is left of the rank that the parent knows by this.
  std::function<void(communicator_key)> on_gone;
  /// The process's work with its device is lost.
  std::function<void(const caf::error&)> on_fault;
  /// Sends bytes to the parent. @thread any
  std::function<caf::error(std::span<const std::byte>)> tell;
};

class guest_backend final : public backend {
public:
  explicit guest_backend(guest_options options) : options_(std::move(options)) {}

  /// A rank as this backend's communicators have it.
  communicator_ranks adopt(communicator_key key, communicator_ranks rank) const;

  std::string_view name() const noexcept override { return options_.executes->name(); }
  int device_count() const noexcept override { return options_.executes->device_count(); }
  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override;
  /// The parent supervises it.
  bool allows_reset() const noexcept override { return false; }
  caf::expected<peer_link> link(int from, int to) noexcept override;
  /// Communicators are the parent's to build.
  caf::expected<communicator_id> make_communicator_id() noexcept override;
  caf::expected<communicator_ranks> build(const communicator_id& id, int size,
                                          std::span<const local_rank> ranks) noexcept override;
  caf::error abort(communicator_ranks ranks) noexcept override;
  caf::error destroy(communicator_ranks ranks) noexcept override;
  /// The other process that has the device is the parent.
  caf::error tell(int ordinal, std::span<const std::byte> what) noexcept override;
  void set_listener(std::function<void(int, std::span<const std::byte>)> f) noexcept override;
  /// The parent has sent something.
  void received(std::span<const std::byte> what) const;
  void abandon(const caf::error& why) noexcept override;

private:
  template <class F> caf::error end(communicator_ranks ranks, F f) noexcept;

  const guest_options options_;
  mutable std::mutex listener_mutex_;
  std::function<void(int, std::span<const std::byte>)> listener_;
};

} // namespace troupe::detail
