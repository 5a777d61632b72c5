/// `world_core`: how it goes on when a device is handed over to its spare.
#include "operation/admission_lock.hpp"
#include "world/world_core.hpp"

#include <utility>

namespace troupe::detail {

bool world_core::needs_communicator() const {
  admission_lock lock;
  return phase_ == world_phase::building && !handed_over_;
}

/// A standby with the spare lets the world go on at once.
caf::error world_core::check_handover(locked lock, int device) const {
  if (rank_of(device) == size() || phase_ > world_phase::ready)
    return {};
  const auto wait = [&](const char* why) {
    return make_error(
        {.code = errc::unavailable, .detail = "world \"" + name_ + "\" " + why, .device = device});
  };
  if (phase_ != world_phase::ready || next_ || builds_ != 0 ||
      (current_ && !current_->fully_connected()))
    return wait("is building a communicator");
  if (on_loss_ == loss_policy::failover && prepares_standbys() && absent().empty() &&
      !has_standby(lock))
    return wait("has no standby yet");
  return {};
}

/// Only devices in workers are handed over. They have no communicators beside a direct one.
void world_core::begin_handover(locked, int device, const caf::error& why) {
  const auto rank = rank_of(device);
  if (rank == size() || phase_ > world_phase::ready)
    return;
  handed_over_ = device;
  if (!current_ || current_->absent().contains(rank))
    return;
  left_ = std::move(current_);
  leaving_.push_back(left_);
  phase_ = world_phase::building; // requests wait
  reason_ = why;
}

void world_core::leave_process(int device, const caf::error& why) {
  if (rank_of(device) == size())
    return;
  std::shared_ptr<communicator> left;
  {
    admission_lock lock;
    left = left_; // the handover may be over already
  }
  if (!left)
    return;
  on_end_(left->epoch(), why, communicator_role::live);
  if (on_live_)
    left->fail(why); // it is unknown here what programs do on it
  else
    left->retire_when_idle();
}

bool world_core::has_left(int device) const {
  admission_lock lock;
  return handed_over_ != device || !left_ || !left_->live();
}

void world_core::end_handover(int device, const caf::error& why) {
  if (rank_of(device) == size())
    return;
  const bool moved = !why;
  bool switched = false;
  std::shared_ptr<communicator> standby;
  std::shared_ptr<communicator> next;
  std::vector<std::shared_ptr<communicator>> unused;
  {
    admission_lock lock; // in one step: else the actor would build in the meantime
    if (left_ && !left_->live())
      left_.reset();
    if (moved && phase_ <= world_phase::ready) {
      ++losses_;
      spares_ready_ = false;
      members_ = members_without(lock, absent()); // with the same memory: the same membership
      if (standby_ && !is_current(*standby_))
        standby = std::move(standby_);
      if (next_ && !is_current(*next_)) { // of a world that is new
        given_up_ = build_epoch_;
        next = next_;
      }
    }
    switched = switch_to_spare(lock, unused);
    if (moved)
      take_prepared(lock, unused); // on the former process
    if (handed_over_ == device)
      handed_over_.reset();
  }
  if (switched)
    go_on_after_switch();
  if (standby)
    standby->retire();
  for (auto& x : unused)
    x->discard();
  if (next)
    next->fail(make_error({.code = errc::device_reset,
                           .detail = "the device was handed over to its spare",
                           .device = device}));
  if (on_gone_)
    on_gone_(); // the actor has an outdated view
}

} // namespace troupe::detail
