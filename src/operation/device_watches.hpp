/// Watchers of devices, which are registered while their owner wants them.
#pragma once

#include "operation/device_state.hpp"
#include <troupe/device_status.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace troupe::detail {

class device_watches {
public:
  device_watches() = default;
  ~device_watches() { clear(); }
  device_watches(const device_watches&) = delete;
  device_watches& operator=(const device_watches&) = delete;

  /// Registers `watcher` as `device_state::watch` does.
  void add(std::shared_ptr<device_state> device,
           std::function<void(const device_changed&)> watcher) {
    auto id = device->watch(std::move(watcher));
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
