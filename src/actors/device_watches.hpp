/// The devices that an actor watches.
#pragma once

#include "operation/device_state.hpp"
#include <troupe/detail/caf_compat.hpp>
#include <troupe/device_status.hpp>

#include <caf/actor.hpp>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace troupe::detail {

/// Sends an actor each change of its devices (`device_changed`), and their present states first.
/// Keeps the actor alive until `clear`.
class device_watches {
public:
  void add(caf::actor to, std::shared_ptr<device_state> device) {
    auto id = device->watch(
        [to = std::move(to)](const device_changed& change) { detail::anon_send(to, change); });
    all_.emplace_back(std::move(device), id);
  }

  void clear() noexcept {
    for (auto& [device, id] : all_)
      device->unwatch(id);
    all_.clear();
  }

private:
  std::vector<std::pair<std::shared_ptr<device_state>, std::uint64_t>> all_;
};

} // namespace troupe::detail
