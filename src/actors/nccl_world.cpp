#include "actors/device_access.hpp"
#include "actors/direct.hpp"
#include "actors/early_reports.hpp"
#include "actors/messages.hpp"
#include "actors/rank_programs.hpp"
#include "actors/reply.hpp"
#include "actors/subscribers.hpp"
#include "actors/supervised.hpp"
#include "actors/world_checks.hpp"
#include "flight/flight_recorder.hpp" // for recorder()
#include "foundation/log.hpp"
#include "foundation/option_check.hpp"
#include "operation/device_watches.hpp"
#include <troupe/flight_record.hpp>
#include <troupe/nccl_world.hpp>
#include <troupe/worker_program.hpp>

#include <caf/all.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <optional>
#include <utility>

namespace troupe::detail {

namespace {

constexpr const char* not_built = "the communicator was not built before the build deadline";

/// Returns a function that sends a `Message` of its arguments to an actor, if that is still there,
/// on any thread.
template <class Message> auto teller(caf::actor_addr to) {
  return [to = std::move(to)](const auto&... fields) {
    if (auto self = caf::actor_cast<caf::actor>(to))
      detail::anon_send(self, Message{fields...});
  };
}

/// Supervises a world. Builds one communicator after the other, while its devices live and its
/// budget of restarts lasts, and a standby beside the live one if the policy says so. Requests go
/// straight to the world's data. They do not need this actor in normal operation, nor for a switch
/// to the standby.
class nccl_world_actor final : public actor_base<>, public direct_receiver<world_request> {
public:
  nccl_world_actor(caf::actor_config& cfg, std::shared_ptr<system_lease> lease,
                   std::shared_ptr<world_core> core, std::shared_ptr<rank_programs> programs)
      : actor_base(cfg), lease_(std::move(lease)), core_(std::move(core)), reachable_(core_),
        programs_(std::move(programs)) {}

  caf::behavior make_behavior() override {
    core_->set_on_end(
        [report = teller<communicator_ended>(address()), programs = programs_,
         ended_at = ended_at_](std::uint64_t epoch, const caf::error& why, communicator_role role) {
          if (auto first = clock::time_point::max(); role == communicator_role::live)
            ended_at->compare_exchange_strong(first, clock::now());
          if (programs && role == communicator_role::live)
            programs->on_end(epoch, why);
          report(epoch, why, role);
        },
        teller<communicator_gone>(address()), teller<beside_wanted>(address()));
    if (programs_)
      programs_->set_world(caf::actor_cast<caf::actor>(this));
    on_down(lease_->root, [this](const caf::error&) {
      fail(make_error(errc::unavailable, "the devices ended"));
    });
    for (auto& x : core_->lanes())
      devices_.add(x->shared_state(), send_changes(caf::actor_cast<caf::actor>(this)));
    detail::send_after(this, caf::actor_cast<caf::actor>(this), core_->limits().build_deadline,
                       build_overdue{});
    return behavior_with(
        this, "a world", core_, world_request{}, [this](caf::exit_msg& x) { end(x.reason); },
        [this](const split& x) { return split_up(x); },
        [this](const get_status&) { return core_->status(); },
        [this](const record_flight& x) {
          auto& limit =
              x.options.deadline.count() != 0 ? x.options.deadline : core_->limits().deadline;
          return reply_when_answered(this, core_->owner().get(),
                                     core_->owner()->recorder().write(x.path, from_now(limit)));
        },
        [this](const subscribe&) {
          if (auto who = subscribers_.add(this); who)
            welcome(who);
        },
        [this](const until_built&) {
          auto reply = make_response_promise<world_status>();
          waiting_.push_back(reply);
          answer_waiting();
          return reply;
        },
        [this](const program_message& x) -> caf::result<void> {
          auto error = programs_ ? programs_->send(x)
                                 : make_error(errc::not_supported, "the world has no program");
          if (error)
            return error;
          return {};
        },
        [this](const program_report& x) { pass_on(x); },
        [this](const program_ended& x) { pass_on(x); },
        [this](const shutdown&) { end(caf::exit_reason::user_shutdown); },
        [this](const device_changed& x) { on_device(x); },
        [this](const communicator_built& x) { on_built(x); },
        [this](const standbys_built& x) { on_standbys_built(x); },
        [this](const communicator_ended& x) { on_ended(x); },
        [this](const beside_wanted&) { try_build_beside(); },
        [this](const beside_built& x) { on_beside_built(x); },
        [this](const communicator_gone&) {
          auto now = core_->status();
          if (now.epoch != told_epoch_ || now.membership != told_membership_) {
            note_ready("with its standby");
            tell();
          }
          try_build();
        },
        [this](const retry_build& x) {
          for (auto* waits : {&retry_, &preparation_retry_, &beside_retry_})
            if (*waits == x.number)
              waits->reset();
          try_build();
        },
        [this](const build_overdue& x) { on_overdue(x); });
  }

  void on_exit() override {
    if (programs_)
      programs_->stop();
    devices_.clear();
    core_->close(world_phase::shut_down, make_error(errc::unavailable, "the world ended"));
    answer_waiting();
    subscribers_.clear();
    programs_.reset(); // the actor may live on while messages to itself are on their way
    reachable_.reset();
    core_.reset();
    lease_.reset();
  }

  bool admit(const world_request& what, const reply_address& answer) override {
    auto core = reachable_.get();
    if (core)
      admit_to(core, what, answer, caf::strong_actor_ptr{ctrl()});
    return core != nullptr;
  }

  void close() override {
    if (auto core = reachable_.get())
      close(*core);
  }

private:
  static void close(world_core& core) {
    core.close(world_phase::shut_down, make_error(errc::unavailable, "the world was shut down"));
  }

  caf::result<world_split> split_up(const split& x) {
    auto groups = split_world(system(), *core_, x, core_->limits());
    if (!groups)
      return groups.error();
    world_split result;
    for (auto& g : *groups)
      result.groups.push_back({g.color, g.name, g.ranks, g.parts.actor});
    return result;
  }

  void on_device(const device_changed& x) {
    if (finished())
      return;
    const auto before = std::exchange(phases_[x.device], x);
    switch (x.phase) {
    case device_phase::failed:
      if (is_absent(x.device))
        break; // the world does not wait for it
      if (core_->go_on_without_failed(x.device)) {
        tell();
        try_build();
        break;
      }
      [[fallthrough]];
    case device_phase::shut_down:
      fail(x.reason ? x.reason : make_error(errc::unavailable, "a device ended"));
      break;
    case device_phase::resetting:
      // If this is the first report of the device, the world has built nothing with it. The same
      // report again is an attempt to come back.
      if (before.device >= 0 && (before.phase != x.phase || before.incarnation != x.incarnation))
        on_reset(x);
      break;
    case device_phase::opening:
      break;
    case device_phase::ready:
      go_on_with_spare();
      try_build();
      break;
    }
  }

  /// Handles a device that has lost its memory and will be ready again.
  void on_reset(const device_changed& x) {
    const bool lost = code_of(x.reason) == errc::worker_lost;
    const auto policy = loss_policy_of(core_->limits());
    if (lost && policy == loss_policy::fail)
      return fail(x.reason);
    if (lost && policy == loss_policy::shrink)
      return; // the core has handled it
    const bool built = building_.has_value();
    if (!core_->end_epoch(x))
      return;
    building_.reset();
    if (lost && built)
      restart(x.reason);
  }

  /// Returns whether the world goes on without the device.
  bool is_absent(int device) const { return core_->absent().contains(core_->rank_of(device)); }

  /// Returns whether all devices are ready in their reported incarnation. Reports come late: by
  /// then the device may be lost, and back. A spare for its next incarnation is used when that is
  /// reported.
  bool devices_ready() const {
    return std::all_of(core_->lanes().begin(), core_->lanes().end(), [this](const auto& x) {
      auto i = phases_.find(x->state().ordinal());
      return (i != phases_.end() && i->second.phase == device_phase::ready &&
              x->state().live_incarnation() == i->second.incarnation) ||
             is_absent(x->state().ordinal());
    });
  }

  enum class wish : std::uint8_t { nothing, communicator, preparation };

  /// Returns what to build now. A build that is not needed now waits until an ended communicator
  /// has left the devices: NCCL's memory there would make building slow, and three communicators
  /// would need more memory than two. Direct communicators are small, so there is a standby as long
  /// as the world may restart.
  wish wanted() {
    if (core_->needs_communicator())
      return retry_ ? wish::nothing : wish::communicator;
    const auto now = core_->status();
    const bool direct = core_->main_way() == collective_way::direct;
    if (now.phase != world_phase::ready || preparation_retry_ ||
        (!direct && core_->communicators() != 1))
      return wish::nothing;
    if (core_->may_grow())
      return wish::communicator;
    if (core_->wants_preparation())
      return preparing_ ? wish::nothing : wish::preparation;
    if (now.standby_ready || !core_->absent().empty() || !core_->keeps_standby())
      return wish::nothing;
    if (!direct || may_restart())
      return wish::communicator;
    if (!restarts_.empty()) // a standby may not be used before the first of them is forgotten
      try_build_after(restarts_.front() + core_->limits().restart_window - clock::now(),
                      preparation_retry_);
    return wish::nothing;
  }

  /// A lost device is ready again: switches to the standby that was built for it, if there is one.
  void go_on_with_spare() {
    if (building_ || !devices_ready() || !core_->switch_to_spare())
      return;
    note_ready("with a spare");
    tell();
  }

  void prepare_for_loss() {
    preparing_ = true;
    core_->prepare_for_loss(teller<standbys_built>(address()));
  }

  void on_standbys_built(const standbys_built& x) {
    preparing_ = false;
    if (finished())
      return;
    if (core_->status().phase != world_phase::ready)
      return try_build(); // the live one ended meanwhile
    if (x.why)
      return on_standby_lost(x.why);
    standby_failures_ = 0;
    tell();
    try_build();
  }

  void try_build() {
    try_build_beside();
    if (building_ || !devices_ready())
      return;
    const auto what = wanted();
    if (what == wish::nothing)
      return;
    if (what == wish::preparation)
      return prepare_for_loss();
    building_ = core_->build(teller<communicator_built>(address()));
    detail::send_after(this, caf::actor_cast<caf::actor>(this), core_->limits().build_deadline,
                       build_overdue{*building_});
  }

  void try_build_beside() {
    if (builds_beside_ || beside_retry_ || !core_->wants_beside() || !devices_ready())
      return;
    builds_beside_ = true;
    core_->build_beside(teller<beside_built>(address()));
  }

  /// Tries again, without end, since direct collectives do not need it.
  void on_beside_built(const beside_built& x) {
    builds_beside_ = false;
    if (finished())
      return;
    if (!x.why) {
      beside_failures_ = 0;
      return try_build_beside();
    }
    if (severity_of(x.why) == severity::process)
      return fail(x.why);
    log(log_level::warning, "world " + core_->name() + " has no NCCL communicator", x.why);
    try_build_after(pause_after(beside_failures_++), beside_retry_);
  }

  /// Tries to build after `pause`. Until then `waits` holds back builds of its kind.
  void try_build_after(std::chrono::nanoseconds pause, std::optional<std::uint64_t>& waits) {
    waits = ++last_retry_;
    detail::send_after(this, caf::actor_cast<caf::actor>(this), pause, retry_build{last_retry_});
  }

  /// Logs that the world goes on, if it does, once for each end of a live communicator.
  void note_ready(const char* how) {
    const auto now = core_->status();
    if (now.phase != world_phase::ready)
      return;
    retry_.reset();
    const auto ended = ended_at_->exchange(clock::time_point::max());
    if (ended == clock::time_point::max())
      return;
    const auto took = std::chrono::ceil<std::chrono::milliseconds>(clock::now() - ended);
    log(log_level::info,
        "world " + core_->name() + " is ready again after " + std::to_string(took.count()) +
            " ms, " + how + ": " + std::to_string(now.members.size()) + " of " +
            std::to_string(core_->size()) + " ranks, epoch " + std::to_string(now.epoch));
  }

  void tell() {
    auto now = core_->status();
    told_epoch_ = now.epoch;
    told_membership_ = now.membership;
    subscribers_.tell(this, std::move(now));
    answer_waiting();
  }

  void welcome(const caf::actor& who) {
    detail::send(this, who, core_->status());
    early_.hand_over(this, who);
  }

  template <class Message> void pass_on(const Message& x) {
    early_.keep(x);
    subscribers_.tell(this, x);
  }

  /// Answers the requests that wait for the end of the build.
  void answer_waiting() {
    const auto now = core_->status();
    if (now.phase == world_phase::building)
      return;
    for (auto& x : std::exchange(waiting_, {}))
      x.deliver(now);
  }

  void on_built(const communicator_built& x) {
    if (building_ != x.epoch)
      return;
    if (!x.why && !core_->open())
      return; // it ended meanwhile, which another message reports
    building_.reset();
    if (finished())
      return;
    if (x.why)
      return on_build_failed(x.why);
    was_ready_ = true;
    note_ready("with a new communicator");
    if (core_->status().standby_ready)
      standby_failures_ = 0;
    tell();
    try_build();
  }

  void on_build_failed(const caf::error& why) {
    if (core_->status().phase == world_phase::building)
      restart(why);
    else
      on_standby_lost(why);
  }

  void on_ended(const communicator_ended& x) {
    if (finished())
      return;
    tell();
    switch (x.role) {
    case communicator_role::next:
      if (building_ != x.epoch)
        return; // another one is being built
      building_.reset();
      if (code_of(x.why) == errc::device_reset)
        return try_build();
      return on_build_failed(x.why);
    case communicator_role::standby:
      return on_standby_lost(x.why);
    case communicator_role::beside:
      return; // built again when a request needs it
    case communicator_role::live:
      note_ready("with its standby");
      if (code_of(x.why) == errc::device_reset)
        return try_build(); // a requested reset, which the budget of restarts does not count
      if (code_of(x.why) == errc::worker_lost &&
          loss_policy_of(core_->limits()) == loss_policy::fail)
        return fail(x.why);
      return restart(x.why);
    }
  }

  /// Tries again, without end, since the live communicator does not need a standby.
  void on_standby_lost(const caf::error& why) {
    if (severity_of(why) == severity::process)
      return fail(why);
    log(log_level::warning, "world " + core_->name() + " has no standby", why);
    try_build_after(pause_after(standby_failures_++), preparation_retry_);
  }

  /// Returns how long to wait after failures of what the world can do without.
  std::chrono::nanoseconds pause_after(std::size_t failures) const {
    auto& limits = core_->limits();
    return std::min<std::chrono::nanoseconds>(doubled(limits.restart_backoff, failures),
                                              limits.restart_window);
  }

  static std::chrono::nanoseconds doubled(std::chrono::nanoseconds pause, std::size_t times) {
    return pause * (1u << std::min<std::size_t>(times, 10));
  }

  /// Builds again, unless the budget of restarts is used up.
  void restart(const caf::error& why) {
    if (severity_of(why) == severity::process)
      return fail(why);
    auto now = clock::now();
    auto& limits = core_->limits();
    bool needed = core_->status().phase == world_phase::building;
    auto& retry = needed ? retry_ : preparation_retry_;
    const auto lost = lost_life(why);
    if (lost && counted_losses_[lost->first] == lost->second) {
      if (!building_ && !retry && devices_ready()) // else the build or the device reports next
        try_build_after(limits.restart_backoff, retry);
      return;
    }
    if (!may_restart()) {
      if (!needed) // the standby goes on, and gets its own when a restart is allowed again
        try_build_after(limits.restarts > 0 ? restarts_.front() + limits.restart_window - now
                                            : limits.restart_window,
                        preparation_retry_);
      else if (!building_)
        fail(too_many_restarts(why));
      return;
    }
    auto earlier = restarts_.size();
    restarts_.push_back(now);
    if (lost)
      counted_losses_[lost->first] = lost->second;
    if (building_)
      return; // the build in progress goes on
    retry_.reset();
    if (earlier == 0 || !needed) // what a standby covers costs nothing
      try_build();
    else
      try_build_after(doubled(limits.restart_backoff, earlier - 1), retry);
  }

  /// Returns whether the budget of restarts is not used up.
  bool may_restart() {
    const auto begin = clock::now() - core_->limits().restart_window;
    while (!restarts_.empty() && restarts_.front() < begin)
      restarts_.pop_front();
    return static_cast<int>(restarts_.size()) < core_->limits().restarts;
  }

  /// Returns the lost device and its incarnation, since several reports may name one loss; none if
  /// `why` is not a loss.
  std::optional<std::pair<int, std::uint64_t>> lost_life(const caf::error& why) const {
    const auto i = phases_.find(failure_of(why).value_or(failure{}).device);
    if (code_of(why) != errc::worker_lost || i == phases_.end())
      return {};
    return std::pair{i->first, i->second.incarnation}; // reported before the next incarnation
  }

  caf::error too_many_restarts(const caf::error& why) const {
    auto last = failure_of(why).value_or(failure{});
    last.detail = "no communicator after " + std::to_string(core_->limits().restarts) +
                  " restarts; the last reason: " + describe(why);
    last.code = code_of(why).value_or(errc::communicator_dead);
    return make_error(std::move(last));
  }

  void on_overdue(const build_overdue& x) {
    if (finished())
      return;
    if (was_ready_) {
      if (building_ == x.epoch) {
        building_.reset();
        auto why = make_error(errc::deadline_exceeded, not_built);
        core_->give_up_build(why);
        on_build_failed(why);
      }
      return;
    }
    if (x.epoch != 0)
      return; // the first build and its devices have one deadline
    std::string missing;
    for (auto& lane : core_->lanes())
      if (auto i = phases_.find(lane->state().ordinal());
          i == phases_.end() || i->second.phase != device_phase::ready)
        missing +=
            (missing.empty() ? "device " : ", ") + std::to_string(lane->state().ordinal()) +
            (i != phases_.end() && i->second.reason ? " (" + describe(i->second.reason) + ")" : "");
    fail(make_error(errc::deadline_exceeded,
                    missing.empty() ? not_built
                                    : "not ready before the build deadline: " + missing));
  }

  bool finished() const {
    auto phase = core_->status().phase;
    return phase == world_phase::failed || phase == world_phase::shut_down;
  }

  void fail(const caf::error& why) {
    if (finished())
      return;
    log(log_level::error, "world " + core_->name() + " failed", why);
    core_->close(world_phase::failed, why);
    tell();
  }

  void end(const caf::error& reason) {
    close(*core_);
    tell();
    quit(reason);
  }

  std::shared_ptr<system_lease> lease_;
  std::shared_ptr<world_core> core_;
  shared_core<world_core> reachable_;       // `core_` for other threads
  std::shared_ptr<rank_programs> programs_; // null: the world has no program
  subscriber_list subscribers_;
  early_reports early_;
  std::vector<caf::typed_response_promise<world_status>> waiting_; // for the end of the build
  device_watches devices_;
  std::map<int, device_changed> phases_;
  std::map<int, std::uint64_t> counted_losses_; // the last lost incarnation, by device
  std::deque<clock::time_point> restarts_;
  std::optional<std::uint64_t> building_; // the epoch that is being built
  bool preparing_ = false;
  std::optional<std::uint64_t> retry_;             // needed builds wait until then
  std::optional<std::uint64_t> preparation_retry_; // other builds wait until then
  std::uint64_t last_retry_ = 0;
  std::uint64_t told_epoch_ = 0;
  std::uint64_t told_membership_ = 0;
  std::size_t standby_failures_ = 0; // in a row
  bool builds_beside_ = false;
  std::optional<std::uint64_t> beside_retry_; // as `retry_`
  std::size_t beside_failures_ = 0;           // in a row
  /// The time when the live communicator ended, until the log says that the world goes on; else the
  /// clock's maximum.
  std::shared_ptr<std::atomic<clock::time_point>> ended_at_ =
      std::make_shared<std::atomic<clock::time_point>>(clock::time_point::max());
  bool was_ready_ = false;
};

} // namespace

caf::expected<world_parts> make_world(caf::actor_system& sys, world_config config) {
  auto core = system_core::of(sys);
  if (!core)
    return core.error();
  auto owner = (*core)->runtime();
  if (!owner)
    return owner.error();
  if (config.devices.empty())
    return make_error(errc::invalid_argument, "world_config::devices is empty");
  if (auto error = check_distinct(config.devices); error)
    return error;
  auto lanes = (*owner)->lanes_of(config.devices);
  if (!lanes)
    return lanes.error();
  if (auto error = check_limits(config.limits, *lanes, !config.program.name.empty()); error)
    return error;
  auto policy = policy_for(config.collectives, (*owner)->backend(), *lanes);
  if (!policy)
    return policy.error();
  const auto& program = config.program;
  if (!program.name.empty())
    if (auto error = check_program_bytes(
            program.arguments.size() + program.name.size() + config.name.size() +
                lanes->size() * sizeof(world_member), // listed in a note
            "names, members and arguments");
        error)
      return error;
  auto lease = (*core)->lease(sys);
  if (!lease)
    return lease.error();
  const auto what = "world \"" + config.name + '"';
  auto data = std::make_shared<world_core>(*owner, std::move(config.name), std::move(*lanes),
                                           countable(config.limits), config.collectives, *policy,
                                           config.ways);
  if (config.nccl_ahead)
    data->want_beside_ahead();
  std::shared_ptr<rank_programs> programs;
  if (!config.program.name.empty()) {
    programs = rank_programs::make((*core)->programs(), data, std::move(config.program));
    data->set_on_live(
        [programs](communicator& x, const world_status& view) { programs->on_live(x, view); });
  }
  auto actor = sys.spawn<nccl_world_actor>((*lease)->held_by(what, lease_holder::actor), data,
                                           std::move(programs));
  return world_parts{(*lease)->held_by(what, lease_holder::handle), std::move(data),
                     std::move(actor)};
}

} // namespace troupe::detail

namespace troupe {

caf::expected<caf::actor> spawn_nccl_world(caf::actor_system& sys, world_config config) {
  auto parts = detail::make_world(sys, std::move(config));
  if (!parts)
    return parts.error();
  return parts->actor;
}

caf::expected<caf::actor> spawn_nccl_world(const std::vector<device>& devices,
                                           world_config config) {
  auto sys = detail::system_of(devices, config.devices, "a world");
  if (!sys)
    return sys.error();
  return spawn_nccl_world(**sys, std::move(config));
}

} // namespace troupe
