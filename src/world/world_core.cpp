#include "world/world_core.hpp"

#include "collective/collective_operations.hpp"
#include "collective/collective_writes.hpp"
#include "foundation/error_text.hpp"
#include "foundation/log.hpp"
#include "operation/order.hpp"
#include "operation/skipping.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace troupe {

std::string_view to_string(world_phase x) noexcept {
  switch (x) {
  case world_phase::building:
    return "building";
  case world_phase::ready:
    return "ready";
  case world_phase::failed:
    return "failed";
  case world_phase::shut_down:
    return "shut_down";
  }
  return "unknown";
}

std::string_view to_string(standby_policy x) noexcept {
  switch (x) {
  case standby_policy::none:
    return "none";
  case standby_policy::same:
    return "same";
  case standby_policy::survivors:
    return "survivors";
  case standby_policy::full:
    return "full";
  }
  return "unknown";
}

std::string_view to_string(loss_policy x) noexcept {
  switch (x) {
  case loss_policy::automatic:
    return "automatic";
  case loss_policy::failover:
    return "failover";
  case loss_policy::shrink:
    return "shrink";
  case loss_policy::rebuild:
    return "rebuild";
  case loss_policy::fail:
    return "fail";
  }
  return "unknown";
}

std::optional<world_status> status_of(const caf::error& e) {
  if (code_of(e) != errc::membership_changed)
    return std::nullopt;
  auto& context = e.context();
  if (context.size() < 2 || !context.match_element<world_status>(1))
    return std::nullopt;
  return context.get_as<world_status>(1);
}

} // namespace troupe

namespace troupe::detail {

using namespace std::chrono_literals;

loss_policy loss_policy_of(const world_limits& x) noexcept {
  if (x.on_loss != loss_policy::automatic)
    return x.on_loss;
  switch (x.standby) {
  case standby_policy::full:
    return loss_policy::failover;
  case standby_policy::survivors:
    return loss_policy::shrink;
  case standby_policy::none:
  case standby_policy::same:
    break;
  }
  return loss_policy::rebuild;
}

world_core::world_core(std::shared_ptr<runtime> runtime, std::string name,
                       std::vector<std::shared_ptr<lane>> lanes, const world_limits& limits)
    : collective_world(std::move(runtime), name, std::move(lanes), limits), name_(std::move(name)),
      on_loss_(loss_policy_of(limits)), prepared_(lanes_.size()) {}

world_core::~world_core() = default;

world_status world_core::status() const {
  std::lock_guard lock{order_mutex()};
  return status_locked();
}

world_status world_core::status_locked() const {
  world_status result{name_, phase_, epoch_, membership_, members_, reason_, has_standby()};
  if (!has_communicator())
    return result;
  result.windows_reason = current_->windows_closed();
  for (auto& x : symmetric_)
    if (auto memory = x.lock(); memory && !result.windows_reason)
      result.windows += memory->with(current_.get()) == symmetric_memory::state::registered;
  return result;
}

// -- life

/// The generations change under the admission lock.
std::vector<world_member> world_core::members_without(rank_set absent) const {
  std::vector<world_member> result;
  for (std::size_t i = 0; i < lanes_.size(); ++i)
    if (!absent.contains(i))
      result.push_back(
          {static_cast<int>(i), lanes_[i]->state().ordinal(), lanes_[i]->state().generation()});
  return result;
}

std::vector<local_rank> world_core::ranks_without(rank_set absent) const {
  std::vector<local_rank> result;
  for (std::size_t i = 0; i < lanes_.size(); ++i)
    if (!absent.contains(i))
      result.push_back({static_cast<int>(result.size()), lanes_[i]->state().ordinal()});
  return result;
}

bool world_core::is_ready(rank_set absent) const {
  for (std::size_t i = 0; i < lanes_.size(); ++i)
    if (!absent.contains(i) && lanes_[i]->state().phase() != device_phase::ready)
      return false;
  return true;
}

// -- communicators

void world_core::set_on_live(std::function<void(communicator&, const world_status&)> on_live) {
  on_live_ = std::move(on_live);
}

void world_core::announce() {
  if (!on_live_)
    return;
  std::shared_ptr<communicator> live;
  world_status view;
  {
    std::lock_guard lock{order_mutex()};
    view = status_locked();
    if (!current_ || view.phase != world_phase::ready || view.epoch == announced_)
      return;
    live = current_;
    announced_ = view.epoch;
  }
  on_live_(*live, view);
}

void world_core::set_on_end(end_listener on_end, std::function<void()> on_gone) {
  on_end_ = std::move(on_end);
  on_gone_ = std::move(on_gone);
  runtime_->watch_losses(
      weak_from_this(), [this](int device, const caf::error& why) { on_device_loss(device, why); });
}

std::uint64_t world_core::build(std::function<void(std::uint64_t, const caf::error&)> done) {
  std::uint64_t epoch = 0;
  rank_set absent; // the absent ranks whose devices are not ready again
  std::vector<world_member> members;
  auto what = connect_scope::everything;
  {
    std::lock_guard lock{order_mutex()};
    epoch = ++last_epoch_;
    const auto lost = this->absent();
    for (std::size_t i = 0; i < lanes_.size(); ++i)
      if (lost.contains(i) && lanes_[i]->state().phase() != device_phase::ready)
        absent = absent.with(i);
    build_absent_ = absent;
    members = members_without(absent);
    if (phase_ == world_phase::building) {
      if (epoch_ != 0 && absent.empty()) // requests may wait since the last communicator ended
        what = connect_scope::collectives;
      epoch_ = epoch;
      set_absent(absent);
      if (members != members_) {
        members_ = members;
        ++membership_;
      }
    }
  }
  auto job = [self = shared_from_this(), epoch, absent, members = std::move(members), what,
              done = std::move(done)] {
    auto give_up = [&](const caf::error& why) {
      done(epoch, code_of(why) == errc::device_fault
                      ? self->runtime_->end_with_fault("the thread that builds communicators", why)
                      : why);
    };
    auto built = self->build_of(self->ranks_without(absent));
    if (!built)
      return give_up(built.error());
    auto target = self->adopt(epoch, absent, members, std::move(*built));
    if (!target)
      return done(epoch, make_error(errc::unavailable,
                                    "the world changed before this communicator was built"));
    self->connect(target, what, [self, target, what, epoch, done](const caf::error& why) {
      if (!why && what == connect_scope::everything)
        return self->register_windows(target, [done, epoch] { done(epoch, {}); });
      if (why)
        target->end(why); // refused or late: the next one must not find it on its lanes
      done(epoch, why);
    });
  };
  runtime_->workers().run(std::move(job));
  return epoch;
}

caf::expected<communicator_ranks> world_core::build_of(std::span<const local_rank> ranks) const {
  auto& backend = runtime_->backend();
  auto id = backend.make_communicator_id();
  if (!id)
    return id.error();
  return backend.build(*id, static_cast<int>(ranks.size()), ranks);
}

void world_core::connect(const std::shared_ptr<communicator>& target, connect_scope what,
                         std::function<void(const caf::error&)> done) {
  auto op = std::make_shared<connect_operation>(target, what, patience(), limits_.connect_limit);
  op->world = tag_;
  op->deadline = behind_the_build();
  op->on_answer([weak = std::weak_ptr{op}, target, what, done = std::move(done)] {
    auto x = weak.lock();
    if (!x)
      return;
    if (!x->error() && what == connect_scope::everything)
      target->set_fully_connected();
    done(x->error());
  });
  runtime_->start(op);
}

/// Makes the other connections. Requests that need them wait; others go on until its turn comes.
void world_core::connect_the_rest(const std::shared_ptr<communicator>& target) {
  connect(target, connect_scope::everything,
          [target, self = weak_from_this()](const caf::error& why) {
            auto world = self.lock();
            if (why)
              target->fail(why);
            else if (world)
              world->runtime_->gate().go_on_soon();
            if (world && !why)
              world->register_windows(target, [] {});
          });
}

std::shared_ptr<communicator> world_core::own(std::uint64_t epoch, rank_set absent,
                                              communicator_ranks ranks) {
  communicators_.fetch_add(1);
  return std::make_shared<communicator>(
      runtime_, epoch, lanes_, absent, std::move(ranks), limits_.quiet_limit,
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
  auto result = own(epoch, absent, std::move(ranks));
  bool wanted = false;
  {
    std::lock_guard lock{order_mutex()};
    wanted = epoch == last_epoch_ && epoch != given_up_ && phase_ <= world_phase::ready &&
             this->absent().includes(absent) && is_ready(absent) &&
             members_without(absent) == members;
    if (wanted)
      next_ = result;
  }
  if (wanted)
    return result;
  result->retire();
  return nullptr;
}

/// Under the admission lock.
void world_core::set_absent(rank_set absent) {
  if (absent == this->absent())
    return;
  matching_.leave_out(absent); // before clients see the change
  absent_.store(absent.bits(), std::memory_order_release);
  ++absences_;
}

/// Begins a new membership for another communicator, if programs drive the ranks. Ranks in
/// different processes do not know how many calls of each were done on the last one, so they have
/// to agree again. Under the admission lock.
void world_core::begin_anew() noexcept {
  if (on_live_)
    ++membership_;
}

bool world_core::open() {
  std::shared_ptr<communicator> opened;
  std::shared_ptr<communicator> left;
  {
    std::lock_guard lock{order_mutex()};
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
      begin_anew();
    opened = current_;
    if (opened->absent() != absent()) {
      set_absent(opened->absent());
      members_ = members_without(absent());
      ++membership_;
    }
    if (absent().empty())
      reason_ = {};
  }
  if (left)
    left->retire_when_idle();
  runtime_->gate().go_on();
  announce();
  if (!opened->fully_connected())
    connect_the_rest(opened);
  return true;
}

bool world_core::enter(const world_status& view, communicator_ranks ranks) {
  auto absent = rank_set::all(size());
  for (auto& x : view.members)
    absent = absent.without(static_cast<std::size_t>(x.rank));
  auto target = own(view.epoch, absent, std::move(ranks));
  target->set_fully_connected();
  std::shared_ptr<communicator> before;
  bool wanted = false;
  {
    std::lock_guard lock{order_mutex()};
    wanted = phase_ <= world_phase::ready && view.epoch > epoch_;
    if (wanted) {
      before = std::exchange(current_, target);
      if (first_epoch_ == 0)
        first_epoch_ = view.epoch;
      epoch_ = view.epoch;
      membership_ = view.membership;
      members_ = view.members;
      set_absent(absent);
      reason_ = view.reason;
      phase_ = world_phase::ready;
    }
  }
  if (before) // its end was not reported
    before->fail(make_error(errc::membership_changed, "the world uses another communicator now"));
  if (wanted)
    runtime_->gate().go_on();
  else
    target->discard();
  return wanted;
}

void world_core::leave(std::uint64_t epoch, const caf::error& cause) {
  std::shared_ptr<communicator> current;
  {
    std::lock_guard lock{order_mutex()};
    if (current_ && current_->epoch() == epoch)
      current = current_;
  }
  if (current && current->can_lose_ranks()) // not on this thread, which receives the ranks' notes
    runtime_->workers().run([current, cause] { current->fail_unless_lost(cause); });
  else if (current)
    current->fail(cause);
}

// -- symmetric memory

/// Under the admission lock.
std::vector<std::shared_ptr<communicator>> world_core::communicators_there() const {
  std::vector<std::shared_ptr<communicator>> result;
  for (auto& x : {current_, next_, standby_})
    if (x && x->live())
      result.push_back(x);
  return result;
}

/// Registers all memory that is not registered with `target`, nor about to be. Then calls `then`.
void world_core::register_windows(const std::shared_ptr<communicator>& target,
                                  std::function<void()> then) {
  std::vector<std::shared_ptr<symmetric_memory>> all; // freed without the lock
  std::vector<std::shared_ptr<symmetric_memory>> wanted;
  {
    std::lock_guard lock{order_mutex()};
    for (auto& x : symmetric_)
      if (auto memory = x.lock(); memory && target->absent().empty())
        all.push_back(std::move(memory));
    for (auto& x : all)
      if (!target->windows_closed() && x->usable() &&
          x->with(target.get()) == symmetric_memory::state::none) {
        x->set(target.get(), symmetric_memory::state::asked_for);
        target->keep_window(x);
        wanted.push_back(x);
      }
  }
  if (wanted.empty())
    return then();
  auto op = std::make_shared<register_operation>(target, patience(), limits_.connect_limit, wanted);
  op->world = tag_;
  op->deadline = behind_the_build();
  op->on_answer(
      [self = shared_from_this(), op = std::weak_ptr{op}, target, wanted, then = std::move(then)] {
        auto x = op.lock();
        if (!x)
          return;
        self->on_registered(target, wanted, x->error());
        then();
      });
  runtime_->start(op);
}

void world_core::on_registered(const std::shared_ptr<communicator>& target,
                               const std::vector<std::shared_ptr<symmetric_memory>>& memory,
                               const caf::error& why) {
  if (why && target->live())
    log(log_level::warning,
        "world " + name_ + " uses its symmetric memory as plain memory in epoch " +
            std::to_string(target->epoch()),
        why);
  using state = symmetric_memory::state;
  std::vector<std::shared_ptr<symmetric_memory>> unused;
  {
    std::lock_guard lock{order_mutex()};
    for (auto& x : memory) {
      if (x->with(target.get()) == state::asked_for) // it was not let go meanwhile
        x->set(target.get(), why ? state::failed : state::registered);
      if (x->with(target.get()) == state::registered &&
          std::none_of(symmetric_.begin(), symmetric_.end(),
                       [&](auto& y) { return y.lock() == x; }))
        unused.push_back(x); // its last handle is gone
    }
    if (why)
      target->close_windows(why);
  }
  for (auto& x : unused)
    deregister(target, x);
}

void world_core::forget(const std::shared_ptr<symmetric_memory>& x) {
  std::vector<std::shared_ptr<communicator>> with;
  {
    std::lock_guard lock{order_mutex()};
    std::erase_if(symmetric_, [&](auto& y) { return y.expired() || y.lock() == x; });
    for (auto& c : communicators_there())
      if (x->with(c.get()) == symmetric_memory::state::registered)
        with.push_back(c);
  }
  for (auto& target : with)
    deregister(target, x);
}

void world_core::deregister(const std::shared_ptr<communicator>& target,
                            const std::shared_ptr<symmetric_memory>& x) {
  auto op = std::make_shared<deregister_operation>(target, x);
  op->deadline = behind_the_build();
  op->on_answer([op = std::weak_ptr{op}, target, x] {
    auto done = op.lock();
    if (!done || done->error()) // the communicator keeps it until it ends
      return;
    std::lock_guard lock{order_mutex()};
    target->let_go_window(x);
  });
  runtime_->start(op);
}

std::shared_ptr<operation_of<world_buffers>> world_core::allocate(dtype type, std::size_t count,
                                                                  allocation_options what,
                                                                  const request_options& options) {
  constexpr auto verb = "allocate";
  if (auto error = check_whole(verb); error)
    return refused_operation<world_buffers>(verb, std::move(error));
  const auto without = absent();
  if (what.symmetric || options.membership != 0) { // else only the devices matter
    const operation request{verb, 0};
    std::lock_guard lock{order_mutex()};
    if (auto error =
            check_view(request, options.membership, what.symmetric ? rank_set{} : absent());
        error)
      return refused_operation<world_buffers>(verb, std::move(error));
  }
  auto refuse = [&](errc code, std::string detail) {
    failure why;
    why.code = code;
    why.verb = verb;
    why.detail = std::move(detail);
    return refused_operation<world_buffers>(verb, make_error(std::move(why)));
  };
  if (!is_dtype(type))
    return refuse(errc::invalid_argument, unknown_dtype(type));
  if (count > SIZE_MAX / size_of(type))
    return refuse(errc::out_of_memory, size_overflows(count, type));
  auto memory =
      what.symmetric
          ? std::make_shared<symmetric_memory>(
                size(), std::max<std::size_t>(count * size_of(type), 1),
                [world = weak_from_this()](std::shared_ptr<symmetric_memory> x) {
                  auto self = world.lock();
                  if (!self)
                    return;
                  // The thread that drops a handle may hold the admission lock.
                  self->runtime_->keeper().call_at(clock::now(), [world, x = std::move(x)] {
                    if (auto alive = world.lock())
                      alive->forget(x);
                  });
                })
          : nullptr;
  auto parts = std::make_shared<allocate_all_operation>(
      lanes_, options.allow_shrunk ? without : rank_set{}, type, count, what.zeroed, memory);
  parts->deadline = from_now(options.deadline.count() != 0 ? options.deadline : limits_.deadline);
  if (!memory) {
    runtime_->start(parts);
    return parts;
  }
  // No lane sees this request: it is answered when the memory is registered, too.
  auto result = std::make_shared<operation_of<world_buffers>>(verb, 0);
  result->deadline = parts->deadline;
  runtime_->keeper().add(*result);
  result->on_answer([owner = runtime_, x = std::weak_ptr{result}] {
    if (auto op = x.lock())
      owner->keeper().remove(*op);
  });
  parts->on_answer([self = shared_from_this(), x = std::weak_ptr{parts}, memory, result] {
    auto done = x.lock();
    if (!done)
      return;
    if (done->error()) {
      result->answer(done->error());
      return;
    }
    result->value = done->value;
    std::vector<std::shared_ptr<communicator>> there;
    {
      std::lock_guard lock{order_mutex()};
      self->symmetric_.push_back(memory);
      there = self->communicators_there();
    }
    auto open = std::make_shared<std::atomic<std::size_t>>(there.size() + 1);
    auto one_less = [open, result] {
      if (open->fetch_sub(1) == 1)
        result->answer({});
    };
    for (auto& target : there)
      self->register_windows(target, one_less);
    one_less();
  });
  runtime_->start(parts);
  return result;
}

void world_core::give_up_build(const caf::error& cause) {
  std::shared_ptr<communicator> next;
  {
    std::lock_guard lock{order_mutex()};
    given_up_ = last_epoch_;
    next = next_;
  }
  if (next)
    next->fail(cause);
}

void world_core::close(world_phase phase, const caf::error& why) {
  std::vector<std::shared_ptr<communicator>> all;
  {
    std::lock_guard lock{order_mutex()};
    phase_ = phase;
    reason_ = why;
    all = take_leaving();
    for (auto* x : {&current_, &next_, &standby_})
      if (*x)
        all.push_back(std::move(*x));
  }
  runtime_->gate().go_on();
  discard_prepared();
  for (auto& x : all)
    x->end(why);
  std::vector<std::shared_ptr<collective_operation>> incomplete; // freed without the lock
  std::lock_guard lock{order_mutex()};
  incomplete = matching_.give_away();
}

bool world_core::end_epoch(int device, const caf::error& cause) {
  std::vector<std::shared_ptr<communicator>> ends;
  std::shared_ptr<communicator> standby;
  const auto rank = rank_of(device);
  auto has_it = [=](auto& x) { return x && !x->absent().contains(rank); };
  bool builds_with = false;
  {
    std::lock_guard lock{order_mutex()};
    builds_with = !build_absent_.contains(rank);
    if (builds_with)
      given_up_ = last_epoch_;
    for (auto& x : take_leaving())
      if (has_it(x))
        ends.push_back(std::move(x));
      else
        leaving_.push_back(x);
    for (auto& x : {current_, next_})
      if (has_it(x))
        ends.push_back(x);
    if (has_it(standby_))
      standby.swap(standby_); // before the end of the live one, which would switch to it
  }
  if (standby)
    standby->retire();
  if (code_of(cause) != errc::worker_lost) // after the loss of a worker, one of them may go on
    discard_prepared();
  for (auto& x : ends)
    x->fail(cause);
  return builds_with;
}

std::size_t world_core::rank_of(int device) const noexcept {
  const auto at = std::find_if(lanes_.begin(), lanes_.end(),
                               [=](auto& x) { return x && x->state().ordinal() == device; });
  return static_cast<std::size_t>(at - lanes_.begin());
}

/// Under the admission lock.
std::vector<std::shared_ptr<communicator>> world_core::take_leaving() {
  std::vector<std::shared_ptr<communicator>> result;
  for (auto& x : leaving_)
    if (auto there = x.lock())
      result.push_back(std::move(there));
  leaving_.clear();
  return result;
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
  std::lock_guard lock{order_mutex()};
  return has_communicator() ? std::min(limits_.connect_limit, beside_a_live_one)
                            : limits_.connect_limit;
}

/// Under the admission lock: no request comes between two communicators, and none is held up.
bool world_core::switch_to_standby(const caf::error& cause) {
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
/// Otherwise adds standbys that are not needed any more to `unused`. Under the admission lock.
bool world_core::leave_current(const caf::error& cause,
                               std::vector<std::shared_ptr<communicator>>& unused) {
  current_.reset();
  if (phase_ != world_phase::ready)
    return false;
  reason_ = cause;
  if (switch_to_standby(cause) || switch_to_survivors()) {
    begin_anew();
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
    std::lock_guard lock{order_mutex()};
    if (current_.get() == &which) {
      switched = leave_current(cause, unused);
    } else if (next_.get() == &which) {
      role = communicator_role::next;
      next_.reset();
    } else if (standby_.get() == &which) {
      role = communicator_role::standby;
      standby_.reset();
    } else {
      return;
    }
  }
  if (switched)
    runtime_->gate().go_on();
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

// -- requests

/// Under the admission lock.
failure world_core::refusal_of(const operation& op, errc code, std::string detail) const {
  auto why = op.describe(code, std::move(detail));
  why.epoch = epoch_;
  why.parts.clear();
  return why;
}

caf::error world_core::check_view(const operation& op, std::uint64_t membership,
                                  rank_set absent) const {
  auto refusal = [&](errc code, std::string detail) {
    return refusal_of(op, code, std::move(detail));
  };
  if (phase_ == world_phase::failed || phase_ == world_phase::shut_down) {
    if (op.place() != 0 && reason_) // what was pending gets the one cause (INV-7)
      return reason_;
    return make_error(
        refusal(errc::unavailable, "the world is " + std::string{to_string(phase_)} +
                                       (reason_ ? ": " + describe(reason_) : std::string{})));
  }
  if (membership == 0 && !is_whole() && first_epoch_ != 0 &&
      (epoch_ != first_epoch_ || !has_communicator()))
    return caf::make_error(
        errc::membership_changed,
        refusal(errc::membership_changed,
                "a communicator of the world has ended, and each rank knows only the number of "
                "its own calls: set request_options::membership"),
        status_locked());
  if (membership != 0 && membership != membership_)
    return caf::make_error(errc::membership_changed,
                           refusal(errc::membership_changed,
                                   "the world has membership " + std::to_string(membership_) +
                                       " now, not " + std::to_string(membership)),
                           status_locked());
  if (absent != this->absent())
    return caf::make_error(
        errc::membership_changed,
        refusal(errc::membership_changed, "the world has " + std::to_string(members_.size()) +
                                              " of its " + std::to_string(size()) +
                                              " ranks now, and the request was for " +
                                              std::to_string(size() - absent.size())),
        status_locked());
  return {};
}

caf::error world_core::check_ranks_since(const operation& op, std::uint64_t absences) const {
  if (absences == absences_)
    return {};
  return caf::make_error(
      errc::membership_changed,
      refusal_of(op, errc::membership_changed, "ranks have left the world or returned since then"),
      status_locked());
}

caf::error world_core::check_view(const char* verb, std::uint64_t membership) const {
  const operation request{verb, 0};
  std::lock_guard lock{order_mutex()};
  return check_view(request, membership, absent());
}

caf::error world_core::enter_queue(const operation& op, queue_bound bound) {
  const auto limit = limit_of(limits_.waiting_limit, bound);
  if (waiting_.fetch_add(1) < limit)
    return {};
  waiting_.fetch_sub(1);
  auto why =
      op.describe(errc::overloaded, std::to_string(limit) + " requests already wait for the world");
  why.epoch = epoch_;
  why.parts.clear();
  return make_error(std::move(why));
}

std::shared_ptr<communicator> world_core::join(collective_done& view) const {
  view.epoch = current_->epoch();
  view.membership = membership_;
  view.ranks.clear();
  if (!current_->absent().empty())
    for (auto i : current_->members())
      view.ranks.push_back(static_cast<std::int32_t>(i));
  return current_;
}

world_core::answer world_core::start(const char* verb, std::vector<rank_call> calls,
                                     const request_options& options, rank_set without) {
  return start(std::make_shared<collective_operation>(verb, shared_from_this(), std::move(calls),
                                                      options.membership, without),
               options);
}

world_core::answer world_core::start(std::shared_ptr<collective_operation> op,
                                     const request_options& options) {
  op->deadline = from_now(options.deadline.count() != 0 ? options.deadline : limits_.deadline);
  runtime_->start(op, options);
  if (!is_whole() && op->place() == 0)
    lose_call(*op);
  spare_operation_.refill([this] {
    auto result = std::make_shared<collective_operation>(*this);
    result->make_room_for_calls();
    return result;
  });
  return op;
}

/// Answers a request without calls at once: it has no lane and no place in the order.
world_core::answer world_core::do_nothing(const char* verb, const request_options& options,
                                          rank_set without) {
  auto result = std::make_shared<operation_of<collective_done>>(verb, 0);
  if (options.deadline.count() < 0) {
    result->answer(result->late());
    return result;
  }
  caf::error why;
  {
    std::lock_guard lock{order_mutex()};
    why = check_view(*result, options.membership, without);
    auto& done = result->value;
    done.operation = result->number();
    done.epoch = epoch_;
    done.membership = membership_;
    if (!without.empty())
      for (auto& x : members_)
        done.ranks.push_back(x.rank);
  }
  result->answer(std::move(why));
  return result;
}

/// Ends the communicator, because a call of this process's rank was refused. The other ranks still
/// make theirs, which must not match the next call of this rank.
void world_core::lose_call(const collective_operation& refused) {
  const auto why = refused.error();
  if (fails_validation(why) || code_of(why) == errc::membership_changed)
    return;
  std::shared_ptr<communicator> current;
  {
    std::lock_guard lock{order_mutex()};
    current = current_;
  }
  if (current)
    current->fail(refused.end_of_communicator(current->epoch(), why));
}

namespace {

caf::error refusal(const char* verb, std::string detail) {
  failure why;
  why.code = errc::invalid_argument;
  why.verb = verb;
  why.detail = std::move(detail);
  return make_error(std::move(why));
}

/// Returns `calls` sorted by rank, each rank's calls in their order.
/// @errors errc::invalid_argument: two calls of a rank use memory that one of them writes
caf::expected<std::vector<rank_call>> by_rank(const char* verb, std::vector<rank_call> calls,
                                              std::span<const std::shared_ptr<lane>> lanes) {
  std::stable_sort(calls.begin(), calls.end(),
                   [](const rank_call& a, const rank_call& b) { return a.rank < b.rank; });
  for (auto a = calls.begin(); a != calls.end(); ++a)
    for (auto b = a + 1; b != calls.end() && b->rank == a->rank; ++b)
      if (conflict(*a, *b)) {
        failure why;
        why.code = errc::invalid_argument;
        why.verb = verb;
        why.rank = static_cast<int>(a->rank);
        why.device = lanes[a->rank]->state().ordinal();
        why.detail = "two calls of the rank use memory that one of them writes";
        return make_error(std::move(why));
      }
  return calls;
}

constexpr std::size_t group_limit = 1024;

} // namespace

caf::error world_core::check_whole(const char* verb) const {
  if (is_whole() && !on_live_)
    return {};
  failure why;
  why.code = errc::not_supported;
  why.verb = verb;
  why.detail = is_whole() ? "the world's ranks are driven by a program, in their own processes"
                          : "the other ranks are in other processes: each rank makes its "
                            "own calls";
  return make_error(std::move(why));
}

/// Returns the ranks that a request with `options` leaves out.
/// @errors errc::membership_changed: it may not leave out any; found before its handles are checked
caf::expected<rank_set> world_core::to_leave_out(const char* verb,
                                                 const request_options& options) const {
  const auto now = absent();
  if (now.empty() || options.allow_shrunk)
    return now;
  const operation request{verb, 0};
  std::lock_guard lock{order_mutex()};
  if (auto error = check_view(request, options.membership, {}); error)
    return error;
  return rank_set{};
}

world_core::answer world_core::run(const collective_view& what, const request_options& options) {
  auto* verb = what.kind == collective_kind::send ? "send_recv" : to_string(what.kind).data();
  auto refuse = [&](caf::error why) {
    return refused_and_skipped<collective_done>(
        verb, std::move(why), options.retry_of,
        [&](std::vector<use>& to) { add_writes(to, what, size()); });
  };
  if (auto error = check_whole(verb); error)
    return refuse(std::move(error));
  auto without = to_leave_out(verb, options);
  if (!without)
    return refuse(std::move(without.error()));
  if (what.kind == collective_kind::send || !without->empty()) {
    auto calls = rank_calls(verb, what, lanes_, *without);
    if (calls && what.kind == collective_kind::send)
      calls = by_rank(verb, std::move(*calls), lanes_); // also for a message from a rank to itself
    return calls ? start(verb, std::move(*calls), options, *without)
                 : refuse(std::move(calls.error()));
  }
  auto ready = spare_operation_.take();
  if (!ready)
    ready = std::make_shared<collective_operation>(*this);
  auto calls = rank_calls(verb, what, lanes_, {}, ready->room_for_calls());
  if (!calls)
    return refuse(std::move(calls.error()));
  ready->begin(verb, shared_from_this(), std::move(*calls), options.membership);
  return start(std::move(ready), options);
}

world_core::answer world_core::run(const group& what) {
  constexpr auto verb = "group";
  auto refuse = [&](caf::error why) {
    return refused_and_skipped<collective_done>(
        verb, std::move(why), what.options.retry_of,
        [&](std::vector<use>& to) { add_writes(to, what, size()); });
  };
  if (auto error = check_whole(verb); error)
    return refuse(std::move(error));
  if (what.calls.size() > group_limit)
    return refuse(refusal(verb, "a group of " + std::to_string(what.calls.size()) +
                                    " calls: the limit is " + std::to_string(group_limit)));
  auto without = to_leave_out(verb, what.options);
  if (!without)
    return refuse(std::move(without.error()));
  if (what.calls.empty())
    return do_nothing(verb, what.options, *without);
  std::vector<rank_call> all;
  for (auto& x : what.calls) {
    auto calls = rank_calls(verb, collective_view{x}, lanes_, *without);
    if (!calls)
      return refuse(std::move(calls.error()));
    std::move(calls->begin(), calls->end(), std::back_inserter(all));
  }
  auto sorted = by_rank(verb, std::move(all), lanes_);
  return sorted ? start(verb, std::move(*sorted), what.options, *without)
                : refuse(std::move(sorted.error()));
}

/// Checks whether rank `rank` may make its own calls here.
caf::error world_core::check_rank(const char* verb, int rank) const {
  if (auto error = is_whole() ? check_whole(verb) : caf::error{}; error)
    return error;
  if (static_cast<std::size_t>(rank) >= size())
    return refusal(verb, out_of_range("rank", rank, size()));
  if (!is_whole() && static_cast<std::size_t>(rank) != local_ranks_.front())
    return refusal(verb, "rank " + std::to_string(rank) + " is not in this process");
  return {};
}

caf::error world_core::why_no_device_of(std::size_t rank) const {
  const auto number = static_cast<std::int64_t>(rank);
  return make_error(errc::invalid_argument,
                    rank >= size()
                        ? out_of_range("rank", number, size())
                        : "the device of rank " + std::to_string(rank) + " is in another process");
}

bool world_core::counts_calls_of(const rank_end& x) const noexcept {
  const auto without = absent();
  return phase_ <= world_phase::ready && !without.contains(x.rank) &&
         (!x.is_message() || (x.peer < size() && !without.contains(x.peer)));
}

/// Counts a refused call that did not become a request.
void world_core::count_refused(const rank_end& of, const caf::error& why,
                               std::uint64_t membership) {
  if (!is_whole() || !counts_among_calls(why, membership))
    return;
  runtime_->gate().drain(); // its rank's earlier calls come first
  std::shared_ptr<collective_operation> ended;
  {
    std::lock_guard lock{order_mutex()};
    if (!counts_calls_of(of))
      return;
    ended = matching_.count_refused(of, why, membership_);
    matching_.passed_over(of);
  }
  if (ended)
    ended->fail(why);
}

caf::error world_core::check_deadline(const char* verb, int rank,
                                      const request_options& options) const {
  if (options.deadline.count() >= 0)
    return {};
  failure why;
  why.code = errc::deadline_exceeded;
  why.verb = verb;
  why.rank = rank;
  why.device = lanes_[static_cast<std::size_t>(rank)]->state().ordinal();
  why.detail = "its deadline was over before it began";
  return make_error(std::move(why));
}

world_core::answer world_core::run(int rank, const collective_view& what,
                                   const request_options& options,
                                   std::shared_ptr<world_core> self) {
  auto* verb = to_string(what.kind).data();
  const auto place = static_cast<std::size_t>(std::max(rank, 0));
  auto refuse = [&](caf::error why) {
    auto result = refused_and_skipped<collective_done>(
        verb, std::move(why), options.retry_of,
        [&](std::vector<use>& to) { add_writes(to, what, size(), place); });
    count_refused({place, what.kind, static_cast<std::size_t>(what.peer)}, result->error(),
                  options.membership);
    return result;
  };
  if (auto error = check_rank(verb, rank); error)
    return refuse(std::move(error));
  if (!is_whole() && troupe::is_message(what.kind) && what.peer == rank)
    return refuse(refusal(verb, "a message of a rank to itself needs both ends in one `exchange`"));
  auto without = to_leave_out(verb, options);
  if (!without)
    return refuse(std::move(without.error()));
  auto call = rank_call_of(verb, what, place, lanes_, *without);
  if (!call)
    return refuse(std::move(call.error()));
  if (!is_whole() && without->empty())
    return start_alone(verb, std::move(*call), options, std::move(self));
  if (!is_whole()) {
    std::vector<rank_call> calls;
    calls.push_back(std::move(*call));
    return start(verb, std::move(calls), options, *without);
  }
  if (auto error = check_deadline(verb, rank, options); error)
    return refuse(std::move(error));
  auto request = new_request(verb, std::move(*call), *without, options, std::move(self));
  request->start(options.room);
  make_spares_of(place);
  return request;
}

/// Starts the operation with this rank's call alone. The other ranks' processes make the other
/// calls, and this process does not compare them.
world_core::answer world_core::start_alone(const char* verb, rank_call call,
                                           const request_options& options,
                                           std::shared_ptr<world_core> self) {
  auto ready = spare_operation_.take();
  if (!ready)
    ready = std::make_shared<collective_operation>(*this);
  auto calls = ready->room_for_calls();
  calls.clear();
  calls.push_back(std::move(call));
  ready->begin(verb, std::move(self), std::move(calls), options.membership);
  return start(std::move(ready), options);
}

std::shared_ptr<rank_request> world_core::new_request(const char* verb, rank_call call,
                                                      rank_set without,
                                                      const request_options& options,
                                                      std::shared_ptr<world_core> self) {
  auto result = matching_.spare_requests[call.rank].take();
  if (!result)
    result = std::make_shared<rank_request>();
  result->begin(verb, std::move(self), std::move(call), without, options);
  result->deadline = from_now(options.deadline.count() != 0 ? options.deadline : limits_.deadline);
  return result;
}

/// Makes the objects for the rank's next call and the operation that it forms with others' calls.
void world_core::make_spares_of(std::size_t rank) {
  matching_.spare_requests[rank].refill([] { return std::make_shared<rank_request>(); });
  matching_.spare_joint.refill([this] {
    auto next = std::make_shared<collective_operation>(*this);
    next->show(matching_.joint_lines);
    return next;
  });
}

world_core::answer world_core::run(const exchange& what, std::shared_ptr<world_core> self) {
  constexpr auto verb = "exchange";
  auto refuse = [&](caf::error why) {
    auto result =
        refused_and_skipped<collective_done>(verb, std::move(why), what.options.retry_of,
                                             [&](std::vector<use>& to) { add_writes(to, what); });
    auto count = [&](const std::vector<message_end>& ends, collective_kind of) {
      for (auto& x : ends)
        count_refused({static_cast<std::size_t>(what.rank), of, static_cast<std::size_t>(x.peer)},
                      result->error(), what.options.membership);
    };
    count(what.sends, collective_kind::send);
    count(what.recvs, collective_kind::recv);
    return result;
  };
  if (auto error = check_rank(verb, what.rank); error)
    return refuse(std::move(error));
  const auto ends = what.sends.size() + what.recvs.size();
  if (ends > group_limit)
    return refuse(refusal(verb, "an exchange of " + std::to_string(ends) +
                                    " messages: the limit is " + std::to_string(group_limit)));
  auto without = to_leave_out(verb, what.options);
  if (!without)
    return refuse(std::move(without.error()));
  auto calls = exchange_calls(verb, what, lanes_, *without);
  if (calls)
    calls = by_rank(verb, std::move(*calls), lanes_);
  if (!calls)
    return refuse(std::move(calls.error()));
  if (calls->empty())
    return do_nothing(verb, what.options, *without);
  if (!is_whole())
    return start(verb, std::move(*calls), what.options, *without);
  if (auto error = check_deadline(verb, what.rank, what.options); error)
    return refuse(std::move(error));
  std::vector<std::shared_ptr<rank_request>> requests;
  for (auto& x : *calls) {
    auto* of_message = to_string(x.call.what).data();
    requests.push_back(new_request(of_message, std::move(x), *without, what.options, self));
  }
  auto result = std::make_shared<exchange_request>(runtime_, std::move(requests));
  result->start(what.options.room);
  make_spares_of(static_cast<std::size_t>(what.rank));
  return result;
}

} // namespace troupe::detail
