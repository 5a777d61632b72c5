#include "actors/direct.hpp"
#include "actors/messages.hpp"
#include "actors/reply.hpp"
#include "actors/subscribers.hpp"
#include "actors/system.hpp"
#include "device/device_core.hpp"
#include "foundation/log.hpp"
#include "operation/device_watches.hpp"
#include <troupe/detail/caf_compat.hpp>
#include <troupe/device.hpp>
#include <troupe/flight_record.hpp>

#include <caf/all.hpp>

#include <map>
#include <utility>

namespace troupe::detail {

namespace {

/// The address of a device, for control only: requests become operations, which send the answers.
class device_actor final : public actor_base<>, public direct_receiver<device_request> {
public:
  device_actor(caf::actor_config& cfg, device_core core)
      : actor_base(cfg), core_(std::move(core)) {}

  caf::behavior make_behavior() override {
    watched_.add(core_.shared_state(), send_changes(caf::actor_cast<caf::actor>(this)));
    return behavior_with(
        this, "a device", core_, device_request{}, [this](caf::exit_msg& x) { quit(x.reason); },
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

/// The root of an actor system's devices: supervises the device actors. They hold no request and no
/// memory, so a dead one is spawned again when it is next needed.
class devices_actor final : public actor_base<> {
public:
  devices_actor(caf::actor_config& cfg, std::shared_ptr<runtime> owner)
      : actor_base(cfg), owner_(std::move(owner)) {
    owner_->begin_replies();
  }

  caf::behavior make_behavior() override {
    return with_exit([this](caf::exit_msg& x) { quit(x.reason); },
                     [this](const get_device_actor& x) { return device(x.device); });
  }

  void on_exit() override { // also if it was killed
    for (auto& [ordinal, child] : devices_)
      caf::anon_send_exit(child, caf::exit_reason::user_shutdown);
    devices_.clear();
    owner_->end_replies(); // no reply may go into a mailbox after the actor system is gone
  }

private:
  caf::result<caf::actor> device(int ordinal) {
    if (auto i = devices_.find(ordinal); i != devices_.end())
      return i->second;
    auto worker = owner_->lane_of(ordinal);
    if (!worker)
      return worker.error();
    auto& settings = dynamic_cast<const troupe::config&>(system().config());
    caf::actor child =
        system().spawn<device_actor>(device_core{owner_, *worker, settings.device_deadline});
    devices_.insert_or_assign(ordinal, child);
    on_down(child, [this, ordinal](const caf::error& why) {
      devices_.erase(ordinal);
      if (why && why != caf::exit_reason::user_shutdown)
        log(log_level::warning, "the actor of device " + std::to_string(ordinal) + " ended", why);
    });
    return child;
  }

  const std::shared_ptr<runtime> owner_;
  std::map<int, caf::actor> devices_;
};

} // namespace

caf::actor spawn_devices(caf::actor_system& sys, std::shared_ptr<runtime> owner) {
  return sys.spawn<devices_actor>(std::move(owner));
}

} // namespace troupe::detail
