/// Actors that subscribe to changes.
#pragma once

#include <troupe/detail/caf_compat.hpp>
#include <troupe/device_status.hpp>

#include <caf/all.hpp>

#include <algorithm>
#include <utility>
#include <vector>

namespace troupe::detail {

/// Returns a watcher of a device that sends each change to `to`, and keeps `to` alive.
inline auto send_changes(caf::actor to) {
  return [to = std::move(to)](const device_changed& change) { detail::anon_send(to, change); };
}

/// The subscribers of an actor. A subscriber that ends is removed.
class subscriber_list {
public:
  /// Adds the sender of the current message, and returns its handle.
  template <class Self> caf::actor add(Self* self) {
    auto who = caf::actor_cast<caf::actor>(self->current_sender());
    if (who && std::find(all_.begin(), all_.end(), who) == all_.end()) {
      all_.push_back(who);
      self->on_down(who, [this, address = who.address()](const caf::error&) {
        std::erase_if(all_, [&](const caf::actor& x) { return x.address() == address; });
      });
    }
    return who;
  }

  template <class Self, class Message> void tell(Self* self, const Message& x) {
    for (auto& who : all_)
      send(self, who, x);
  }

  void clear() { all_.clear(); }

private:
  std::vector<caf::actor> all_;
};

} // namespace troupe::detail
