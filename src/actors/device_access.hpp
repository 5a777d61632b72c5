/// Access from library code to the parts of a `device`.
#pragma once

#include "actors/system.hpp"
#include "device/device_core.hpp"
#include <troupe/device.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace troupe::detail {

/// Waits until the device is ready, or cannot become ready.
/// @errors errc::deadline_exceeded: it is not ready yet; else why it cannot become ready
caf::error wait_until_ready(device_state& state, std::chrono::nanoseconds deadline);

/// Returns the actor system of all `devices`, and their ordinals there.
/// @errors errc::invalid_argument: `what` has no devices, or devices of several systems
caf::expected<caf::actor_system*> system_of(const std::vector<device>& devices,
                                            std::vector<int>& ordinals, std::string_view what);

struct device_access {
  static caf::actor_system& system_of(const device& x) { return x.lease_->system; }

  static const device_core& core_of(const device& x) noexcept { return x.core(); }
  static const std::shared_ptr<system_lease>& lease_of(const device& x) { return x.lease_; }

  static device make(const std::shared_ptr<system_lease>& lease, std::shared_ptr<runtime> owner,
                     std::shared_ptr<lane> worker) {
    auto& settings = dynamic_cast<const troupe::config&>(lease->system.config());
    auto what = "device " + std::to_string(worker->state().ordinal());
    auto core = std::make_shared<device_core>(std::move(owner), std::move(worker),
                                              settings.device_deadline);
    return device{lease->held_by(std::move(what), lease_holder::handle), std::move(core)};
  }

  /// Returns a device that refuses all requests with `why`.
  static device none(caf::error why) {
    return device{nullptr, std::make_shared<device_core>(std::move(why))};
  }
};

} // namespace troupe::detail
