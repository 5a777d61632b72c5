/// `world_core`: how it builds, connects, adopts and ends communicators.
#include "collective/connect_operation.hpp"
#include "operation/admission_lock.hpp"
#include "world/world_core.hpp"

#include <algorithm>
#include <utility>

namespace troupe::detail {

using namespace std::chrono_literals;

void world_core::set_on_live(std::function<void(communicator&, const world_status&)> on_live) {
  on_live_ = std::move(on_live);
}

void world_core::announce() {
  if (!on_live_)
    return;
  std::shared_ptr<communicator> live;
  world_status view;
  {
    admission_lock lock;
    view = status(lock);
    if (!current_ || view.phase != world_phase::ready || view.epoch == announced_)
      return;
    live = current_;
    announced_ = view.epoch;
  }
  on_live_(*live, view);
}

void world_core::set_on_end(end_listener on_end, std::function<void()> on_gone,
                            std::function<void()> on_wanted) {
  on_end_ = std::move(on_end);
  on_gone_ = std::move(on_gone);
  on_wanted_ = std::move(on_wanted);
  runtime_->watch_losses(weak_from_this(), [this](int device, const caf::error& why) {
    why ? on_device_loss(device, why) : on_device_back();
  });
  runtime_->moves().add_listener(weak_from_this());
}

// -- building and connecting

std::uint64_t world_core::build(std::function<void(std::uint64_t, const caf::error&)> done) {
  std::uint64_t epoch = 0;
  rank_set absent; // the absent ranks whose devices are not ready again
  std::vector<world_member> members;
  auto what = connect_scope::everything;
  {
    admission_lock lock;
    epoch = build_epoch_ = ++last_epoch_;
    ++builds_;
    const auto lost = this->absent();
    for (std::size_t i = 0; i < lanes_.size(); ++i)
      if (lost.contains(i) && lanes_[i]->state().phase() != device_phase::ready)
        absent = absent.with(i);
    build_absent_ = absent;
    members = members_without(lock, absent);
    if (phase_ == world_phase::building) {
      if (epoch_ != 0 && absent.empty()) // requests may wait since the last communicator ended
        what = connect_scope::collectives;
      epoch_ = epoch;
      set_absent(lock, absent);
      if (members != members_) {
        members_ = members;
        ++membership_;
      }
    }
  }
  auto job = [self = shared_from_this(), epoch, absent, members = std::move(members), what,
              then = std::move(done)] {
    const auto end = [self, then](std::uint64_t of, const caf::error& why) {
      --self->builds_;
      then(of, why);
    };
    auto built = self->build_of(self->ranks_without(absent));
    if (!built)
      return end(epoch, self->end_on_fault(built.error()));
    auto target = self->adopt(epoch, absent, members, std::move(*built));
    if (!target)
      return end(epoch, make_error(errc::unavailable,
                                   "the world changed before this communicator was built"));
    auto connected = [target, epoch, end](const caf::error& why) {
      if (why)
        target->end(why); // refused or late: the next one must not find it on its lanes
      end(epoch, why);
    };
    if (self->main_way() == collective_way::direct)
      self->give_access(target, std::move(connected));
    else
      self->connect(target, what, std::move(connected));
  };
  runtime_->workers().run(std::move(job));
  return epoch;
}

/// Returns the error of a build. A fault of a device ends the process's work first.
caf::error world_core::end_on_fault(const caf::error& why) const {
  return code_of(why) == errc::device_fault
             ? runtime_->end_with_fault("the thread that builds communicators", why)
             : why;
}

caf::expected<communicator_ranks> world_core::build_of(std::span<const local_rank> ranks) const {
  auto& backend = runtime_->backend();
  if (main_way() == collective_way::direct)
    return backend.build_direct(ranks);
  auto id = backend.make_communicator_id();
  if (!id)
    return id.error();
  return backend.build(*id, static_cast<int>(ranks.size()), ranks);
}

void world_core::start_on(const std::shared_ptr<communicator>& target,
                          std::shared_ptr<operation_of<nothing>> op, bool completes,
                          std::function<void(const caf::error&)> done) {
  op->deadline = behind_the_build();
  op->on_answer([weak = std::weak_ptr{op}, target, completes, done = std::move(done)] {
    auto x = weak.lock();
    if (!x)
      return;
    if (!x->error() && completes)
      target->set_fully_connected();
    done(x->error());
  });
  runtime_->start(std::move(op));
}

void world_core::connect(const std::shared_ptr<communicator>& target, connect_scope what,
                         std::function<void(const caf::error&)> done) {
  auto op = std::make_shared<connect_operation>(target, what, patience(), limits_.connect_limit);
  op->world = tag_;
  start_on(target, std::move(op), what == connect_scope::everything, std::move(done));
}

void world_core::give_access(const std::shared_ptr<communicator>& target,
                             std::function<void(const caf::error&)> done) {
  start_on(target, std::make_shared<access_operation>(target), true, std::move(done));
}

/// Makes the other connections. Requests that need them wait; others go on until its turn comes.
void world_core::connect_the_rest(const std::shared_ptr<communicator>& target) {
  connect(target, connect_scope::everything,
          [target, self = weak_from_this()](const caf::error& why) {
            if (why)
              target->fail(why);
            else if (auto world = self.lock())
              world->runtime_->admissions().go_on_soon();
          });
}

/// Returns a deadline for an operation on a communicator that is being built. It is later than the
/// build deadline, at which the world gives that communicator up (`give_up_build`).
clock::time_point world_core::behind_the_build() const {
  return from_now(limits_.build_deadline + 1s);
}

/// Returns how long lanes that are ready to connect wait for the others. The time is short beside a
/// live communicator, because its requests wait too.
std::chrono::nanoseconds world_core::patience() const {
  constexpr std::chrono::nanoseconds beside_a_live_one = std::chrono::seconds{2};
  admission_lock lock;
  return has_communicator() ? std::min(limits_.connect_limit, beside_a_live_one)
                            : limits_.connect_limit;
}

// -- adopting and opening

std::shared_ptr<communicator> world_core::own(std::uint64_t epoch, collective_way way,
                                              rank_set absent, communicator_ranks ranks) {
  communicators_.fetch_add(1);
  return std::make_shared<communicator>(
      runtime_, epoch, way, lanes_, absent, std::move(ranks), limits_.quiet_limit,
      [self = weak_from_this()](communicator& which, const caf::error& cause) {
        if (auto world = self.lock())
          world->on_communicator_end(which, cause);
      },
      [self = weak_from_this()] {
        auto world = self.lock();
        if (!world)
          return;
        world->communicators_.fetch_sub(1);
        if (world->on_gone_)
          world->on_gone_();
      });
}

std::shared_ptr<communicator> world_core::adopt(std::uint64_t epoch, rank_set absent,
                                                const std::vector<world_member>& members,
                                                communicator_ranks ranks) {
  auto result = own(epoch, main_way(), absent, std::move(ranks));
  bool wanted = false;
  {
    admission_lock lock;
    wanted = epoch == build_epoch_ && epoch != given_up_ && phase_ <= world_phase::ready &&
             this->absent().includes(absent) && is_ready(absent) &&
             members_without(lock, absent) == members;
    if (wanted)
      next_ = result;
  }
  if (wanted)
    return result;
  result->retire();
  return nullptr;
}

void world_core::set_absent(locked lock, rank_set absent) {
  if (absent == this->absent())
    return;
  matching_.leave_out(lock, absent); // before clients see the change
  absent_.store(absent.bits(), std::memory_order_release);
  ++absence_changes_;
}

/// Begins a new membership for another communicator, if programs drive the ranks. Ranks in
/// different processes do not know how many calls of each were done on the last one, so they have
/// to agree again.
void world_core::begin_anew(locked) noexcept {
  if (on_live_)
    ++membership_;
}

bool world_core::open() {
  std::shared_ptr<communicator> opened;
  std::shared_ptr<communicator> left;
  {
    admission_lock lock;
    if (!next_ || !next_->live() || phase_ > world_phase::ready)
      return false;
    if (phase_ == world_phase::ready && next_->absent() == absent()) {
      reason_ = {};
      standby_ = std::move(next_); // it was empty: the actor builds none while there is one
      return true;
    }
    left = std::move(current_); // it has fewer ranks
    std::erase_if(leaving_, [](auto& x) { return x.expired(); });
    if (left)
      leaving_.push_back(left);
    current_ = std::move(next_);
    epoch_ = current_->epoch();
    phase_ = world_phase::ready;
    if (std::exchange(opened_, true))
      begin_anew(lock);
    opened = current_;
    if (opened->absent() != absent()) {
      set_absent(lock, opened->absent());
      members_ = members_without(lock, absent());
      ++membership_;
    }
    if (absent().empty())
      reason_ = {};
  }
  if (left)
    left->retire_when_idle();
  runtime_->admissions().go_on();
  announce();
  if (!opened->fully_connected())
    connect_the_rest(opened);
  return true;
}

bool world_core::adopt_communicator(const world_status& view, communicator_ranks ranks) {
  auto absent = rank_set::all(size());
  for (auto& x : view.members)
    absent = absent.without(static_cast<std::size_t>(x.rank));
  auto target = own(view.epoch, main_way(), absent, std::move(ranks));
  target->set_fully_connected();
  std::shared_ptr<communicator> before;
  bool wanted = false;
  {
    admission_lock lock;
    wanted = phase_ <= world_phase::ready && view.epoch > epoch_;
    if (wanted) {
      before = std::exchange(current_, target);
      if (first_epoch_ == 0)
        first_epoch_ = view.epoch;
      epoch_ = view.epoch;
      membership_ = view.membership;
      members_ = view.members;
      set_absent(lock, absent);
      reason_ = view.reason;
      phase_ = world_phase::ready;
    }
  }
  if (before) // its end was not reported
    before->fail(make_error(errc::membership_changed, "the world uses another communicator now"));
  if (wanted)
    runtime_->admissions().go_on();
  else
    target->discard();
  return wanted;
}

// -- ending

void world_core::fail_epoch(std::uint64_t epoch, const caf::error& cause) {
  std::shared_ptr<communicator> current;
  {
    admission_lock lock;
    if (current_ && current_->epoch() == epoch)
      current = current_;
  }
  if (current && current->can_lose_ranks()) // not on this thread, which receives the ranks' notes
    runtime_->workers().run([current, cause] { current->fail_unless_lost(cause); });
  else if (current)
    current->fail(cause);
}

void world_core::give_up_build(const caf::error& cause) {
  std::shared_ptr<communicator> next;
  {
    admission_lock lock;
    given_up_ = build_epoch_;
    next = next_;
  }
  if (next)
    next->fail(cause);
}

void world_core::close(world_phase phase, const caf::error& why) {
  std::vector<std::shared_ptr<communicator>> all;
  {
    admission_lock lock;
    phase_ = phase;
    reason_ = why;
    all = take_leaving(lock);
    for (auto* x : {&current_, &next_, &standby_, &beside_.live, &beside_.next})
      if (*x)
        all.push_back(std::move(*x));
  }
  runtime_->admissions().go_on();
  discard_prepared();
  for (auto& x : all)
    x->end(why);
  std::vector<std::shared_ptr<collective_operation>> incomplete; // freed without the lock
  admission_lock lock;
  incomplete = matching_.give_away(lock);
}

bool world_core::end_epoch(const device_changed& report) {
  std::vector<std::shared_ptr<communicator>> ends;
  std::shared_ptr<communicator> standby;
  const auto rank = rank_of(report.device);
  const auto has_it = [=](auto& x) { return x && !x->absent().contains(rank); };
  bool builds_with = false;
  {
    admission_lock lock;
    builds_with = !build_absent_.contains(rank);
    if (builds_with)
      given_up_ = build_epoch_;
    // The world may go on with the device's spare already.
    if (lanes_[rank]->state().incarnation() != report.incarnation)
      return builds_with;
    for (auto& x : take_leaving(lock))
      if (has_it(x))
        ends.push_back(std::move(x));
      else
        leaving_.push_back(x);
    for (auto& x : {current_, next_, beside_.live, beside_.next})
      if (has_it(x))
        ends.push_back(x);
    if (has_it(standby_))
      standby.swap(standby_); // before the end of the live one, which would switch to it
  }
  if (standby)
    standby->retire();
  if (code_of(report.reason) != errc::worker_lost) // else one of them may go on
    discard_prepared();
  for (auto& x : ends)
    x->fail(report.reason);
  return builds_with;
}

std::vector<std::shared_ptr<communicator>> world_core::take_leaving(locked) {
  std::vector<std::shared_ptr<communicator>> result;
  for (auto& x : leaving_)
    if (auto there = x.lock())
      result.push_back(std::move(there));
  leaving_.clear();
  return result;
}

/// With the lock held, no request comes between two communicators, and none is held up.
bool world_core::switch_to_standby(locked, const caf::error& cause) {
  if (!standby_ || severity_of(cause) >= severity::device)
    return false;
  for (auto& x : lanes_) // a device that is reset or ends would end the standby, too
    if (x->state().phase() != device_phase::ready)
      return false;
  current_ = std::move(standby_);
  epoch_ = current_->epoch();
  return true;
}

/// Removes the live communicator, which ends. Returns true if the next one is in its place.
/// Otherwise adds standbys that are not needed any more to `unused`.
bool world_core::leave_current(locked lock, const caf::error& cause,
                               std::vector<std::shared_ptr<communicator>>& unused) {
  current_.reset();
  if (phase_ != world_phase::ready)
    return false;
  reason_ = cause;
  if (switch_to_standby(lock, cause) || switch_to_survivors(lock)) {
    begin_anew(lock);
    return true;
  }
  phase_ = world_phase::building;
  if (standby_)
    unused.push_back(std::move(standby_));
  return false;
}

void world_core::on_communicator_end(communicator& which, const caf::error& cause) noexcept {
  auto role = communicator_role::live;
  bool switched = false;
  std::vector<std::shared_ptr<communicator>> unused;
  {
    admission_lock lock;
    if (current_.get() == &which) {
      switched = leave_current(lock, cause, unused);
    } else if (next_.get() == &which) {
      role = communicator_role::next;
      next_.reset();
    } else if (standby_.get() == &which) {
      role = communicator_role::standby;
      standby_.reset();
    } else if (beside_.live.get() == &which) {
      role = communicator_role::beside;
      beside_.live.reset();
    } else if (beside_.next.get() == &which) { // its build reports the error
      beside_.next.reset();
      return;
    } else {
      return;
    }
  }
  if (switched)
    runtime_->admissions().go_on();
  for (auto& x : unused)
    x->retire();
  // The prepared standbys are older than the next communicator. Only after the loss of a device
  // does one of them become the next.
  if (role == communicator_role::live && !switched && code_of(cause) != errc::worker_lost)
    discard_prepared();
  on_end_(which.epoch(), cause, role);
  if (switched)
    announce();
}

} // namespace troupe::detail
