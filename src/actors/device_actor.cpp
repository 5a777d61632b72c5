#include "actors/device_watches.hpp"
#include "actors/direct.hpp"
#include "actors/reply.hpp"
#include "actors/spawn.hpp"
#include "actors/subscribers.hpp"
#include "device/device_core.hpp"
#include <troupe/device.hpp>
#include <troupe/flight_record.hpp>

#include <caf/all.hpp>

#include <utility>

namespace troupe::detail {

namespace {

/// The address of a device, for control only: requests become operations, which send the answers.
class device_actor final : public actor_base<>, public direct_receiver<device_request> {
public:
  device_actor(caf::actor_config& cfg, device_core core)
      : actor_base(cfg), core_(std::move(core)) {}

  caf::behavior make_behavior() override {
    watched_.add(caf::actor_cast<caf::actor>(this), core_.shared_state());
    return behavior_with(
        this, core_, device_request{}, [this](caf::exit_msg& x) { quit(x.reason); },
        [this](const record_flight& x) {
          return reply_when_answered(this, core_.owner(), core_.record_flight(x.path, x.options));
        },
        [this](const shutdown&) { close(); },
        [this](const watch_generation&) {
          if (auto who = subscribers_.add(this); who && last_.device >= 0)
            detail::send(this, who, last_);
        },
        [this](const device_changed& change) {
          last_ = change;
          subscribers_.tell(this, change);
        });
  }

  void on_exit() override {
    watched_.clear();
    subscribers_.clear();
  }

  bool admit(const device_request& what, const reply_address& answer) override {
    admit_to(core_, what, answer, caf::strong_actor_ptr{ctrl()});
    return true;
  }

  void close() override {
    core_.shut_down(make_error(errc::unavailable, "the device was shut down"));
  }

private:
  const device_core core_;
  device_watches watched_;
  device_changed last_;
  subscriber_list subscribers_;
};

} // namespace

caf::actor spawn_device_actor(caf::actor_system& sys, device_core core) {
  return sys.spawn<device_actor>(std::move(core));
}

} // namespace troupe::detail
