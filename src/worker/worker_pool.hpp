/// Where the devices of a parent get their workers from.
#pragma once

#include "worker/shared_segments.hpp"
#include "worker/worker_link.hpp"

#include <memory>

namespace troupe::detail {

/// @thread any
class worker_pool {
public:
  virtual ~worker_pool() = default;

  virtual int device_count() const noexcept = 0;
  /// The worker of a device; if there is none, or it is lost, another one is started. Blocks.
  /// @errors errc::unavailable: none could be started, and why
  virtual caf::expected<std::shared_ptr<worker_link>> provide(int ordinal) noexcept = 0;
  /// The worker of a device, if there is one.
  virtual std::shared_ptr<worker_link> current(int ordinal) const noexcept = 0;
  /// Has another worker ready for when that of the device is lost: `provide` then gives it at once.
  /// Blocks.
  /// @errors errc::unavailable: none could be started, and why
  virtual caf::error provide_spare(int ordinal) noexcept = 0;
  /// The spare of a device, if there is one.
  virtual std::shared_ptr<worker_link> spare(int ordinal) const noexcept = 0;
  /// The device needs its worker no more: it ends in good order. Blocks.
  virtual void release(int ordinal) noexcept = 0;

  shared_segments& segments() noexcept { return *segments_; }
  /// The same; it may outlive the workers.
  const std::shared_ptr<shared_segments>& shared() const noexcept { return segments_; }

private:
  const std::shared_ptr<shared_segments> segments_ = std::make_shared<shared_segments>();
};

} // namespace troupe::detail
