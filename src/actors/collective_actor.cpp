#include "actors/messages.hpp"
#include "actors/spawn.hpp"
#include "actors/subscribers.hpp"
#include <troupe/device_status.hpp>

#include <caf/all.hpp>

#include <utility>

namespace troupe::detail {

namespace {

/// Belongs to a device and knows the worlds with a rank on it, to which it reports the device's
/// changes. The worlds' operations are issued by the device's lane.
class collective_actor final : public actor_base<> {
public:
  collective_actor(caf::actor_config& cfg, std::shared_ptr<device_state> device)
      : actor_base(cfg), device_(std::move(device)) {}

  caf::behavior make_behavior() override {
    watch_ = device_->watch([self = caf::actor_cast<caf::actor>(this)](
                                const device_changed& change) { detail::anon_send(self, change); });
    return with_exit([this](caf::exit_msg& x) { quit(x.reason); },
                     [this](const join_communicator&) {
                       if (auto world = worlds_.add(this); world && last_.device >= 0)
                         detail::send(this, world, last_);
                     },
                     [this](const device_changed& change) {
                       last_ = change;
                       worlds_.tell(this, change);
                     });
  }

  void on_exit() override {
    device_->unwatch(watch_);
    worlds_.clear();
  }

private:
  const std::shared_ptr<device_state> device_;
  std::uint64_t watch_ = 0;
  device_changed last_;
  subscriber_list worlds_;
};

} // namespace

caf::actor spawn_collective_actor(caf::actor_system& sys, std::shared_ptr<device_state> device) {
  return sys.spawn<collective_actor>(std::move(device));
}

} // namespace troupe::detail
