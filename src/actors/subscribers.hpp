/// Actors that subscribe to changes.
#pragma once

#include <troupe/detail/caf_compat.hpp>
#include <troupe/device_status.hpp>
#include <troupe/worker_program.hpp>

#include <caf/all.hpp>

#include <algorithm>
#include <cstddef>
#include <deque>
#include <utility>
#include <variant>
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

/// Keeps the reports and ends of programs that come before their world's first subscriber, for it:
/// the newest ones.
class early_reports {
public:
  static constexpr std::size_t most_bytes = std::size_t{1} << 20;

  void keep(const program_report& x) { keep(entry{x}, x.bytes.size()); }
  void keep(const program_ended& x) { keep(entry{x}, 0); }

  /// Sends all to the first subscriber. From then on nothing is kept.
  template <class Self> void hand_over(Self* self, const caf::actor& first) {
    for (auto& x : std::exchange(all_, {}))
      std::visit([&](auto& what) { send(self, first, std::move(what)); }, x.what);
    over_ = true;
  }

private:
  using entry = std::variant<program_report, program_ended>;
  struct kept {
    entry what;
    std::size_t size_bytes = 0;
  };

  void keep(entry what, std::size_t content_bytes) {
    if (over_)
      return;
    const auto size_bytes = sizeof(kept) + content_bytes;
    all_.push_back({std::move(what), size_bytes});
    size_bytes_ += size_bytes;
    while (size_bytes_ > most_bytes) {
      size_bytes_ -= all_.front().size_bytes;
      all_.pop_front();
    }
  }

  std::deque<kept> all_;
  std::size_t size_bytes_ = 0;
  bool over_ = false;
};

} // namespace troupe::detail
