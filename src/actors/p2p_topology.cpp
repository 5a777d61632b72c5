#include "actors/direct.hpp"
#include "actors/messages.hpp"
#include "actors/reply.hpp"
#include "actors/subscribers.hpp"
#include "actors/supervised.hpp"
#include "foundation/option_check.hpp"
#include "operation/device_watches.hpp"
#include <troupe/device.hpp>
#include <troupe/p2p_topology.hpp>

#include <caf/all.hpp>

#include <map>
#include <numeric>
#include <string>
#include <utility>

namespace troupe::detail {

namespace {

/// Supervises a topology: when one of its devices begins a new generation, access to it and from it
/// is enabled. Requests go straight to the topology's data.
class p2p_topology_actor final : public actor_base<>, public direct_receiver<topology_request> {
public:
  p2p_topology_actor(caf::actor_config& cfg, std::shared_ptr<system_lease> lease,
                     std::shared_ptr<topology_core> core)
      : actor_base(cfg), lease_(std::move(lease)), core_(std::move(core)) {}

  caf::behavior make_behavior() override {
    core_->set_on_change([to = address()] {
      if (auto self = caf::actor_cast<caf::actor>(to))
        detail::anon_send(self, graph_changed{});
    });
    core_->find_links();
    on_down(lease_->root, [this](const caf::error&) { quit(caf::exit_reason::user_shutdown); });
    for (std::size_t index = 0; index < core_->size(); ++index) {
      auto& on = core_->lane_at(index);
      indices_[on.state().ordinal()] = index;
      devices_.add(on.shared_state(), send_changes(caf::actor_cast<caf::actor>(this)));
    }
    return behavior_with(
        this, "a topology", core_, topology_request{}, [this](caf::exit_msg& x) { quit(x.reason); },
        [this](const get_graph&) { return core_->graph(); },
        [this](const get_stats&) { return core_->stats(); },
        [this](const subscribe&) {
          tell_news();
          if (auto who = subscribers_.add(this); who)
            detail::send(this, who, last_told_);
        },
        [this](const shutdown&) { quit(caf::exit_reason::user_shutdown); },
        [this](const device_changed& x) { on_device(x); },
        [this](const graph_changed&) { on_graph(); });
  }

  void on_exit() override {
    devices_.clear();
    close();
    subscribers_.clear();
    lease_.reset();
  }

  bool admit(const topology_request& what, const reply_address& answer) override {
    admit_to(core_, what, answer, caf::strong_actor_ptr{ctrl()});
    return true;
  }

  void close() override { core_->close(make_error(errc::unavailable, "the topology ended")); }

private:
  void on_device(const device_changed& x) {
    auto index = indices_.find(x.device);
    if (index == indices_.end())
      return;
    if (auto& last = connected_[x.device]; x.phase == device_phase::ready && x.incarnation > last) {
      last = x.incarnation;
      core_->connect(index->second);
    }
    core_->note_change();
  }

  void on_graph() {
    core_->check_new_links();
    tell_news();
  }

  void tell_news() {
    auto now = core_->graph();
    if (now.version == last_told_.version)
      return;
    last_told_ = std::move(now);
    subscribers_.tell(this, last_told_);
  }

  std::shared_ptr<system_lease> lease_;
  const std::shared_ptr<topology_core> core_;
  subscriber_list subscribers_;
  std::map<int, std::size_t> indices_; // by ordinal
  device_watches devices_;
  std::map<int, std::uint64_t> connected_; // incarnations, by ordinal
  p2p_graph last_told_;
};

} // namespace

caf::expected<topology_parts> make_topology(caf::actor_system& sys, topology_config config) {
  auto core = system_core::of(sys);
  if (!core)
    return core.error();
  auto owner = (*core)->runtime();
  if (!owner)
    return owner.error();
  if (config.devices.empty()) {
    config.devices.resize(static_cast<std::size_t>((*owner)->device_count()));
    std::iota(config.devices.begin(), config.devices.end(), 0);
  }
  if (auto error = check_distinct(config.devices); error)
    return error;
  const auto& limits = config.limits;
  for (auto [name, bytes] : {std::pair{"topology_limits::pattern_bytes", limits.pattern_bytes},
                             std::pair{"topology_limits::measured_bytes", limits.measured_bytes}})
    if (auto error = check_at_least(name, as_signed(bytes), 1))
      return error;
  for (auto [name, limit] : {std::pair{"topology_limits::deadline", limits.deadline},
                             std::pair{"topology_limits::open_deadline", limits.open_deadline}})
    if (auto error = check_positive(name, limit); error)
      return error;
  auto lanes = (*owner)->lanes_of(config.devices);
  if (!lanes)
    return lanes.error();
  auto lease = (*core)->lease(sys);
  if (!lease)
    return lease.error();
  auto data = std::make_shared<topology_core>(*owner, std::move(config), std::move(*lanes));
  const std::string what = "a topology";
  auto actor = sys.spawn<p2p_topology_actor>((*lease)->held_by(what, lease_holder::actor), data);
  return topology_parts{(*lease)->held_by(what, lease_holder::handle), std::move(data),
                        std::move(actor)};
}

} // namespace troupe::detail

namespace troupe {

caf::expected<caf::actor> spawn_p2p_topology(caf::actor_system& sys, topology_config config) {
  auto parts = detail::make_topology(sys, std::move(config));
  if (!parts)
    return parts.error();
  return parts->actor;
}

} // namespace troupe
