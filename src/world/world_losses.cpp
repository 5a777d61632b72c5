// How a world handles the loss of a device, and how it prepares for one.

#include "foundation/start_thread.hpp"
#include "operation/admission_lock.hpp"
#include "world/world_core.hpp"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

namespace troupe::detail {

namespace {
bool is_there(const std::shared_ptr<communicator>& x) noexcept { return x && x->live(); }

/// A queue of the ranks whose spares are ready, in order of arrival, or the errors.
class arrivals {
public:
  void add(std::size_t rank, caf::error why) {
    {
      std::lock_guard lock{mutex_};
      come_.emplace_back(rank, std::move(why));
    }
    condition_.notify_one();
  }
  /// Waits for the next one.
  std::pair<std::size_t, caf::error> next() {
    std::unique_lock lock{mutex_};
    condition_.wait(lock, [this] { return !come_.empty(); });
    auto result = std::move(come_.front());
    come_.pop_front();
    return result;
  }

private:
  std::mutex mutex_;
  std::condition_variable condition_;
  std::deque<std::pair<std::size_t, caf::error>> come_;
};

} // namespace

bool world_core::has_standby_for_each(locked) const noexcept {
  return std::all_of(prepared_.begin(), prepared_.end(), is_there);
}

bool world_core::keeps_communicators() const noexcept {
  return main_way() == collective_way::direct || limits_.standby == standby_policy::communicators ||
         limits_.standby == standby_policy::full;
}

bool world_core::prepares_standbys() const noexcept {
  if (on_loss_ == loss_policy::failover)
    return keeps_communicators();
  return on_loss_ == loss_policy::shrink && size() > 1 && lanes_.front()->is_remote() &&
         keeps_communicators(); // only devices in worker processes are lost
}

bool world_core::keeps_standby() const noexcept {
  return keeps_communicators() && !prepares_standbys();
}

bool world_core::has_standby(locked lock) const noexcept {
  return prepares_standbys() ? has_standby_for_each(lock) : is_there(standby_);
}

bool world_core::wants_preparation() const {
  admission_lock lock;
  if (phase_ != world_phase::ready || !absent().empty())
    return false;
  return prepares_standbys() ? !has_standby_for_each(lock)
                             : on_loss_ == loss_policy::failover && !spares_ready_;
}

/// The result is valid as long as the members are the same.
void world_core::prepare_for_loss(std::function<void(const caf::error&)> done) {
  std::uint64_t first = 0;
  std::uint64_t membership = 0;
  std::uint64_t losses = 0;
  {
    admission_lock lock;
    first = last_epoch_ + 1;
    last_epoch_ += size();
    ++builds_;
    membership = membership_;
    losses = losses_;
  }
  runtime_->workers().run(
      [self = shared_from_this(), first, membership, losses, done = std::move(done)] {
        auto error = self->prepare_for_loss(first, membership, losses);
        if (error)
          self->discard_prepared(); // all of them or none
        --self->builds_;
        done(error);
      });
}

caf::error world_core::prepare_for_loss(std::uint64_t first_epoch, std::uint64_t membership,
                                        std::uint64_t losses) {
  const auto with_standbys = prepares_standbys();
  // A standby is built as soon as the spares that it needs are ready, while the others start.
  arrivals spares;
  std::vector<std::jthread> starts;
  const auto start = [&](const auto& one) {
    std::jthread own;
    if (start_thread(own, one, "to start a spare"))
      one(); // without a thread, one after the other
    else
      starts.push_back(std::move(own));
  };
  for (std::size_t k = 0; k < size(); ++k)
    if (on_loss_ == loss_policy::failover)
      start([&, k] {
        spares.add(k, runtime_->backend().provide_spare(lanes_[k]->state().ordinal()));
      });
    else
      spares.add(k, {});
  caf::error error;
  for (std::size_t i = 0; i < size(); ++i) {
    const auto [k, why] = spares.next();
    if (!error)
      error = why || !with_standbys ? why : build_standby(first_epoch + k, membership, k);
  }
  if (error)
    return error;
  admission_lock lock;
  if (membership != membership_ || losses != losses_ || phase_ != world_phase::ready ||
      (with_standbys && !has_standby_for_each(lock)))
    return make_error(errc::unavailable, "a device or a spare was lost in the meantime");
  spares_ready_ = true;
  reason_ = {};
  return {};
}

/// Builds the standby for the loss of rank `k`.
caf::error world_core::build_standby(std::uint64_t epoch, std::uint64_t membership, std::size_t k) {
  const auto with_spare = on_loss_ == loss_policy::failover;
  const auto absent = with_spare ? rank_set{} : rank_set::of(k);
  auto ranks = ranks_without(absent);
  if (with_spare)
    ranks[k].spare = true;
  auto built = build_of(ranks);
  if (!built)
    return built.error();
  auto target = own(epoch, main_way(), absent, std::move(*built));
  target->set_fully_connected();
  if (with_spare)
    target->rank(k).on_loss([weak = weak_from_this(), which = std::weak_ptr{target}, k] {
      auto world = weak.lock();
      auto standby = which.lock();
      if (world && standby)
        world->on_spare_lost(standby, k);
    });
  bool wanted = false;
  {
    admission_lock lock;
    wanted = membership == membership_ && phase_ == world_phase::ready && !target->has_lost_rank();
    if (wanted)
      prepared_[k] = target;
  }
  if (!wanted) {
    target->discard();
    return make_error(errc::membership_changed, "the world changed before its standbys were built");
  }
  if (with_spare && target->has_lost_rank()) // perhaps before it was a standby
    on_spare_lost(target, k);
  return {};
}

/// Ends all communicators with the device, so that no request of its next generation gets to one.
void world_core::on_device_loss(int device, const caf::error& why) {
  std::vector<std::shared_ptr<communicator>> ends;
  std::vector<std::shared_ptr<communicator>> idle;
  std::shared_ptr<communicator> live; // the live one, which ends
  bool switched = false;
  bool others = false; // the world has other members
  {
    admission_lock lock;
    if (rank_of(device) != size()) {
      ++losses_;
      spares_ready_ = false;
    }
    if (standby_ && standby_->has_lost_rank())
      idle.push_back(
          std::move(standby_)); // before the end of the live one, which would switch to it
    for (auto& x : prepared_)
      if (x && x->has_lost_rank())
        idle.push_back(std::move(x));
    if (next_ && next_->has_lost_rank())
      ends.push_back(next_);
    for (auto& x : leaving_)
      if (auto there = x.lock(); there && there->has_lost_rank())
        ends.push_back(std::move(there));
    const auto before = membership_;
    go_on_without(lock, device);
    others = membership_ != before;
    if (current_ && current_->has_lost_rank()) {
      live = current_;
      switched = leave_current(lock, why, idle);
    } else if (phase_ == world_phase::building && opened_) { // the live one ended before
      switched = switch_to_survivors(lock);
    }
  }
  if (switched)
    runtime_->admissions().go_on();
  if (!idle.empty()) // it takes time, and the device waits to be opened
    runtime_->workers().run([idle = std::move(idle)] {
      for (auto& x : idle)
        x->discard();
    });
  for (auto& x : ends)
    x->fail(why);
  if (live) {
    on_end_(live->epoch(), why, communicator_role::live);
    live->fail(why);
  } else if ((switched || others) && on_gone_) {
    on_gone_(); // the actor has an outdated view of the end
  }
  if (switched)
    announce();
}

/// Goes on with the spare of a lost device. Processes of programs are told of it, which may take
/// long: their worlds go on when the actor says so.
void world_core::on_device_back() {
  if (!on_live_ && switch_to_spare() && on_gone_)
    on_gone_(); // the actor has an outdated view
}

/// Goes on without the lost ranks, if that is the policy. If none is left, waits for any to return.
void world_core::go_on_without(locked lock, int device) {
  if (on_loss_ != loss_policy::shrink || !opened_ || phase_ > world_phase::ready)
    return;
  if (rank_of(device) == size())
    return;
  rank_set away = absent();
  rank_set ended;
  for (std::size_t i = 0; i < lanes_.size(); ++i) { // a loss may be reported twice
    const auto phase = lanes_[i]->state().phase();
    if (phase != device_phase::ready)
      away = away.with(i);
    if (phase == device_phase::failed || phase == device_phase::shut_down)
      ended = ended.with(i);
  }
  const auto now = away.size() != size() ? away : ended.size() != size() ? ended : rank_set{};
  if (now == absent())
    return;
  set_absent(lock, now);
  members_ = members_without(lock, now);
  ++membership_;
}

bool world_core::go_on_without_failed(int device) {
  go_on_without(admission_lock{}, device);
  runtime_->admissions().go_on_soon(); // held requests may need a rank that is gone
  return absent().contains(rank_of(device));
}

/// If exactly one rank is lost, switches to the standby for that.
bool world_core::switch_to_survivors(locked) {
  const auto now = absent();
  if (now.size() != 1)
    return false;
  auto& x = prepared_[now.first()];
  if (!is_there(x) || x->has_lost_rank() || x->absent() != now || !is_ready(now))
    return false;
  current_ = std::move(x);
  epoch_ = current_->epoch();
  phase_ = world_phase::ready;
  return true;
}

bool world_core::may_grow() const {
  admission_lock lock;
  if (phase_ != world_phase::ready)
    return false;
  const auto now = absent();
  for (std::size_t i = 0; i < lanes_.size(); ++i)
    if (now.contains(i) && lanes_[i]->state().phase() == device_phase::ready)
      return true;
  return false;
}

/// Drops the standbys, if `which` is still one of them and is not live.
void world_core::on_spare_lost(const std::shared_ptr<communicator>& which, std::size_t k) {
  {
    admission_lock lock;
    if (prepared_[k] != which)
      return;
  }
  discard_prepared();
  on_end_(which->epoch(),
          make_error({.code = errc::worker_lost,
                      .detail = "the spare of the device is gone",
                      .device = lanes_[k]->state().ordinal(),
                      .rank = static_cast<int>(k)}),
          communicator_role::standby);
}

void world_core::discard_prepared() {
  std::vector<std::shared_ptr<communicator>> all;
  take_prepared(admission_lock{}, all);
  for (auto& x : all)
    x->discard();
}

bool world_core::switch_to_spare() {
  std::vector<std::shared_ptr<communicator>> unused;
  bool switched = false;
  {
    admission_lock lock;
    switched = !handed_over_ && switch_to_spare(lock, unused);
  }
  for (auto& x : unused)
    x->discard();
  if (switched)
    go_on_after_switch();
  return switched;
}

/// Adds the standbys that are left to `unused`. Without a switch there is none, unless all devices
/// are ready.
bool world_core::switch_to_spare(locked lock, std::vector<std::shared_ptr<communicator>>& unused) {
  if (on_loss_ != loss_policy::failover || phase_ != world_phase::building || !is_ready({}))
    return false;
  bool switched = false;
  // Standbys with another rank's spare have a lost rank, or one on a former process.
  for (auto& x : prepared_)
    if (!switched && is_there(x) && is_current(*x)) {
      current_ = std::move(x);
      switched = true;
    }
  take_prepared(lock, unused);
  if (switched) {
    epoch_ = current_->epoch();
    auto members = members_without(lock, {});
    if (members != members_ || on_live_)
      ++membership_;
    members_ = std::move(members);
    phase_ = world_phase::ready;
  }
  return switched;
}

void world_core::go_on_after_switch() {
  runtime_->admissions().go_on();
  announce();
}

void world_core::take_prepared(locked, std::vector<std::shared_ptr<communicator>>& to) {
  for (auto& x : prepared_)
    if (x)
      to.push_back(std::move(x));
}

bool world_core::is_current(communicator& x) const {
  for (std::size_t i = 0; i < size(); ++i)
    if (!runtime_->backend().is_current(x.rank(i), lanes_[i]->state().ordinal()))
      return false;
  return true;
}

} // namespace troupe::detail
