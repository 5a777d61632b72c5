#include "runtime/device_losses.hpp"

#include <mutex>
#include <utility>

namespace troupe::detail {

struct device_losses::loss {
  std::mutex mutex;
  caf::error cause;
  bool is_over = true;

  /// Keeps the first reason of a loss. Later reasons are of attempts to open the device again.
  void note(const device_changed& x) {
    std::lock_guard lock{mutex};
    if (x.reason && std::exchange(is_over, false))
      cause = x.reason;
    if (x.phase == device_phase::ready)
      is_over = true;
  }
};

device_losses::device_losses(std::vector<std::shared_ptr<device_state>> devices) {
  for (auto& x : devices) {
    auto last = std::make_shared<loss>();
    watches_.add(x, [last](const device_changed& change) { last->note(change); });
    all_.push_back({std::move(x), std::move(last)});
  }
}

caf::error device_losses::cause_of(const caf::error& why) const {
  auto text = failure_of(why);
  if (!text || (text->code != errc::stale_ref && troupe::cause_of(why) != errc::worker_lost))
    return why;
  for (auto& x : all_)
    if (x.device->ordinal() == text->device) {
      static_cast<void>(x.device->reason()); // takes its lock: its watchers have been called
      std::lock_guard lock{x.last->mutex};
      return x.last->cause ? x.last->cause : why;
    }
  return why;
}

} // namespace troupe::detail
