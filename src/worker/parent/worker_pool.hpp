/// Source of the workers for the devices of a parent.
#pragma once

#include "worker/parent/device_slabs.hpp"
#include "worker/parent/prepared_launches.hpp"
#include "worker/parent/shared_segments.hpp"
#include "worker/parent/shared_slabs.hpp"
#include "worker/parent/worker_link.hpp"
#include <troupe/worker.hpp>

#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <stop_token>
#include <utility>

namespace troupe::detail {

/// @thread any
class worker_pool {
public:
  /// `keep_freed`: as in `cuda_backend_options`
  explicit worker_pool(
      std::shared_ptr<shared_segments> segments = std::make_shared<shared_segments>(),
      std::chrono::milliseconds keep_freed = cuda_backend_options{}.keep_freed)
      : keep_freed_(keep_freed), segments_(std::move(segments)) {}
  virtual ~worker_pool() = default;

  virtual int device_count() const noexcept = 0;
  /// Returns the worker of a device; starts one if there is none or it is lost. Blocks, but returns
  /// soon after a stop request.
  /// @errors errc::unavailable: no worker could be started, and why
  virtual caf::expected<std::shared_ptr<worker_link>>
  provide(int ordinal, const std::stop_token& stop = {}) noexcept = 0;
  /// Returns the worker of a device, if there is one.
  virtual std::shared_ptr<worker_link> current(int ordinal) const noexcept = 0;
  /// Prepares a spare for the loss of the worker: `provide` then returns it at once. Blocks as
  /// `provide` does.
  /// @errors errc::unavailable: no worker could be started, and why
  virtual caf::error provide_spare(int ordinal, const std::stop_token& stop = {}) noexcept = 0;
  /// Returns the spare of a device, if there is one.
  virtual std::shared_ptr<worker_link> spare(int ordinal) const noexcept = 0;
  /// Makes `spare`, the spare of a device, its worker. The former one is ended in the background,
  /// when no rank of a communicator is in it any more.
  /// @errors errc::worker_lost: the worker is lost, or `spare` is not the spare any more; nothing
  ///         has changed; errc::not_supported
  virtual caf::error move_to_spare(int ordinal, const worker_link& spare) noexcept {
    static_cast<void>(spare);
    return make_error({.code = errc::not_supported,
                       .detail = "the device cannot be moved to its spare",
                       .device = ordinal});
  }
  /// Stops the worker of a device that needs it no more. Blocks.
  virtual void release(int ordinal) noexcept = 0;

  /// Returns whether two devices can do direct collectives with each other in their workers.
  virtual bool reaches(int from, int to) const noexcept {
    static_cast<void>(from);
    static_cast<void>(to);
    return false;
  }

  using program_listener = std::function<void(int ordinal, std::span<const std::byte>)>;
  /// Sets the receiver of messages from the programs of all workers, on any thread.
  void set_listener(program_listener f) {
    std::lock_guard lock{listener_mutex_};
    listener_ = std::make_shared<const program_listener>(std::move(f));
  }

  /// Returns where the device is. Workers know the devices of their host by their ordinals there.
  virtual device_place place_of(int ordinal) const { return {{}, ordinal}; }

  shared_segments& segments() noexcept { return *segments_; }
  /// Returns a shared owner: it may outlive the workers.
  const std::shared_ptr<shared_segments>& shared() const noexcept { return segments_; }

  std::chrono::milliseconds keep_freed() const noexcept { return keep_freed_; }
  /// The slabs of the devices of this host.
  const std::shared_ptr<shared_slabs>& slabs() const noexcept { return slabs_; }
  /// Notes the memory of an open device.
  void set_memory_of(int ordinal, const std::shared_ptr<device_slabs>& memory) {
    const std::lock_guard lock{memory_mutex_};
    memory_[ordinal] = memory;
  }
  /// Returns the memory of a device; null: it is not open.
  std::shared_ptr<device_slabs> memory_of(int ordinal) {
    const std::lock_guard lock{memory_mutex_};
    return memory_[ordinal].lock();
  }

  /// Returns the launches that workers of a device have prepared.
  prepared_launches& prepared(int ordinal) {
    const std::lock_guard lock{prepared_mutex_};
    return prepared_[ordinal];
  }

protected:
  void told(int ordinal, std::span<const std::byte> what) const {
    std::shared_ptr<const program_listener> to;
    {
      std::lock_guard lock{listener_mutex_};
      to = listener_;
    }
    if (to && *to)
      (*to)(ordinal, what);
  }

private:
  mutable std::mutex listener_mutex_;
  std::shared_ptr<const program_listener> listener_;
  const std::chrono::milliseconds keep_freed_;
  const std::shared_ptr<shared_segments> segments_;
  const std::shared_ptr<shared_slabs> slabs_ = std::make_shared<shared_slabs>();
  std::mutex memory_mutex_;
  std::map<int, std::weak_ptr<device_slabs>> memory_; ///< by ordinal
  std::mutex prepared_mutex_;
  std::map<int, prepared_launches> prepared_; ///< by ordinal
};

} // namespace troupe::detail
