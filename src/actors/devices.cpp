#include "actors/messages.hpp"
#include "actors/spawn.hpp"
#include "foundation/log.hpp"
#include <troupe/detail/caf_compat.hpp>

#include <caf/all.hpp>

#include <map>
#include <utility>

namespace troupe::detail {

namespace {

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
    auto child =
        spawn_device_actor(system(), device_core{owner_, *worker, settings.device_deadline});
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
