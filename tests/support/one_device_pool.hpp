/// A pool of the workers of one device, for tests that make the links themselves.
#pragma once

#include "worker/parent/worker_pool.hpp"

#include <memory>
#include <stop_token>
#include <utility>

namespace troupe::testing {

/// The worker and the spare of one device.
class one_device_pool final : public detail::worker_pool {
public:
  /// @param spare may be null
  explicit one_device_pool(std::shared_ptr<detail::worker_link> worker,
                           std::shared_ptr<detail::worker_link> spare = nullptr)
      : worker_(std::move(worker)), spare_(std::move(spare)) {}
  int device_count() const noexcept override { return 1; }
  caf::expected<std::shared_ptr<detail::worker_link>>
  provide(int, const std::stop_token&) noexcept override {
    return worker_;
  }
  std::shared_ptr<detail::worker_link> current(int) const noexcept override { return worker_; }
  caf::error provide_spare(int, const std::stop_token&) noexcept override { return {}; }
  std::shared_ptr<detail::worker_link> spare(int) const noexcept override { return spare_; }
  void release(int) noexcept override {}

private:
  const std::shared_ptr<detail::worker_link> worker_;
  const std::shared_ptr<detail::worker_link> spare_;
};

} // namespace troupe::testing
