#include "admission/admission.hpp"

#include "admission/access_order.hpp"
#include "admission/deadline_watch.hpp"
#include "admission/request_checks.hpp"
#include "foundation/spin.hpp"
#include "lane/lane.hpp"
#include "lane/retired_operations.hpp"
#include "operation/admission_lock.hpp"
#include "operation/device_state.hpp"
#include "operation/skipping.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <iterator>
#include <mutex>

namespace troupe::detail {

std::mutex& admission_lock::mutex() noexcept {
  static std::mutex instance;
  return instance;
}

admission_lock::admission_lock(spin_first) noexcept { lock_hot(mutex()); }

namespace {

/// The longest queue that is tried as one whole operation: more than a host has devices.
constexpr std::size_t most_together = 16;

void expect_parts(locked lock, operation& op) noexcept {
  for (auto& p : op.parts())
    p.on->expect_part(lock);
}

/// Returns whether the lanes keep an order behind `first`, so that what is held behind it may go
/// on.
bool keeps_order_behind(locked lock, const operation& first) noexcept {
  return first.on_lanes() && !first.has_lost_part(lock) && !may_follow_lost_work(lock, first);
}

/// Returns whether a device of `op` is lost and not back yet.
bool is_away(locked lock, const operation& op) noexcept {
  return std::ranges::any_of(op.parts(), [&](const part& p) { return p.on->is_away(lock); });
}

/// Drops parts that no lane takes.
void let_go(const std::vector<part*>& parts) noexcept {
  for (auto* p : parts) {
    lane::set_skipped(*p);
    p->on->wake(); // a part behind it on that lane may wait for this one alone
    p->of->on_part_over(*p);
    p->of->part_over();
  }
}

} // namespace

caf::error admission::admit(const std::shared_ptr<operation>& op, room_policy room) {
  const auto how = choose_room(room);
  bool held = false;
  auto refusal = find_room(
      how, op->deadline, [&] { return admit(op, how, held); },
      [&] { return who_makes_room(admission_lock{}, *op, how.bound); });
  if (refusal) {
    if (!fails_validation(refusal))
      op->mark_refused(admission_lock{}, refusal);
    return refusal;
  }
  if (held)
    watch_held(op);
  else
    lane::wake_to_work(op->parts());
  process_retired.free_all(); // while the lanes work
  return {};
}

/// Operations behind `op` need not wait for it if it completes before it is on the lanes.
void admission::watch_held(const std::shared_ptr<operation>& op) {
  op->on_answer([self = weak_from_this(), held = std::weak_ptr{op}] {
    if (auto x = held.lock(); x && !x->on_lanes())
      if (auto alive = self.lock())
        alive->go_on_soon();
  });
}

bool admission::admit_again(std::span<retry> all, std::optional<std::size_t> expected) {
  const auto now = clock::now();
  operations held;
  deferred_actions after;
  bool complete = true;
  {
    admission_lock lock;
    bring_up_to_date(lock, after);
    if (expected && retries_.waiting() != *expected) {
      all = {};
      complete = false;
    }
    retry_order::check(lock, all);
    for (auto& x : all) {
      if (x.refusal) // its former attempt leaves its marks in its place in the order
        continue;
      bool waits = false;
      x.refusal = check_deadline(*x.attempt, now);
      if (!x.refusal)
        x.refusal = place_now(lock, x.attempt, queue_bound::second, now.time_since_epoch().count(),
                              waits, after);
      if (x.refusal) // earlier attempts overwrite the marks of the former one
        x.attempt->mark_refused(lock, x.refusal);
      else
        x.attempt->retries()->end_wait();
      if (waits)
        held.push_back(x.attempt);
    }
  }
  finish(after);
  for (auto& x : held)
    watch_held(x);
  for (auto& x : all)
    if (!x.refusal)
      lane::wake_to_work(x.attempt->parts());
  return complete;
}

caf::error admission::admit(const std::shared_ptr<operation>& op, room_choice how, bool& held) {
  auto now = clock::now();
  if (auto error = check_deadline(*op, now); error)
    return error;
  caf::error refusal;
  deferred_actions after;
  {
    admission_lock lock{admission_lock::spin_first{}};
    bring_up_to_date(lock, after);
    refusal = place(lock, op, how.bound, now.time_since_epoch().count(), held, after);
  }
  finish(after);
  return refusal;
}

room_maker admission::who_makes_room(locked lock, const operation& op, queue_bound bound) const {
  for (auto& p : op.parts())
    if (!p.on->accepts(lock, bound))
      return who_makes_room(lock, *p.on);
  return room_maker::others;
}

/// A lane drains its own queue. Only held operations wait for another thread: for a rank's call.
room_maker admission::who_makes_room(locked lock, const lane& full) const {
  std::size_t held = 0;
  for (auto& x : held_)
    held += static_cast<std::size_t>(std::ranges::count(x.op->parts(), &full, &part::on));
  if (full.queued() > held)
    return room_maker::others;
  auto result = room_maker::others;
  for (auto& x : held_)
    if (!x.op->failed()) // else it leaves the queue by itself
      result = std::max(result, x.op->maker_of_calls(lock));
  return result;
}

caf::error admission::place(locked lock, const std::shared_ptr<operation>& op, queue_bound bound,
                            std::int64_t now, bool& held, deferred_actions& after) {
  if (op->retries() != nullptr && retries_.defers(lock))
    return retries_.defer(lock, *op);
  return place_now(lock, op, bound, now, held, after);
}

caf::error admission::place_now(locked lock, const std::shared_ptr<operation>& op,
                                queue_bound bound, std::int64_t now, bool& held,
                                deferred_actions& after) {
  if (auto error = check_lanes(lock, *op, op->bounded(), bound); error)
    return error;
  if (auto error = op->on_check(lock); error)
    return error;
  if (auto error = check_uses(lock, *op, *op, op->uses()); error)
    return error;
  if (auto error = op->on_admit(lock, bound); error)
    return error;
  commit(lock, op, now, held, after);
  return {};
}

void admission::commit(locked lock, const std::shared_ptr<operation>& op, std::int64_t now,
                       bool& held, deferred_actions& after) {
  op->admitted(lock, now);
  dependencies around;
  const bool waits = op->waits_for(lock) != nullptr || is_away(lock, *op);
  const bool may_be_held = waits || !held_.empty() || device_state::any_has_lost_work(lock);
  order_uses(lock, op, around, op->uses(), may_be_held);
  for (auto& u : op->uses()) // only after all are ordered: uses of one operation do not conflict
    note_use(lock, op, around, u, ++last_access_, may_be_held);
  if (op->retries() != nullptr)
    retries_.note_admitted(lock, *op);
  expect_parts(lock, *op);
  held = waits || !around.behind.empty();
  if (held)
    held_.add({std::move(around), op});
  else
    submit(lock, *op, after);
  deadlines_.add_late(*op);
}

void admission::enqueue(const std::shared_ptr<operation>& request, rank_submission& how) noexcept {
  how.self_ = request;
  how.next_ = queue_.load(std::memory_order_relaxed);
  while (!queue_.compare_exchange_weak(how.next_, &how)) {
  }
}

void admission::drain() {
  deferred_actions after;
  {
    admission_lock lock{admission_lock::spin_first{}};
    bring_up_to_date(lock, after);
  }
  finish(after);
  process_retired.free_all();
}

void admission::drain_soon() noexcept {
  constexpr std::chrono::milliseconds soon{1};
  if (placing_soon_.exchange(true))
    return;
  auto place = [self = weak_from_this()] {
    if (auto alive = self.lock()) {
      alive->placing_soon_.store(false);
      alive->drain();
    }
  };
  if (deadlines_.call_at(clock::now() + soon, place) == 0)
    place();
}

caf::error admission::place_together(std::span<const submission> all, queue_bound bound) {
  caf::error refusal;
  deferred_actions after;
  {
    admission_lock lock;
    bring_up_to_date(lock, after);
    for (auto i = all.begin(); i != all.end() && !refusal; ++i)
      refusal = check_alone(lock, *i->self, *i->how, bound);
    if (refusal)
      all = {};
    for (auto& [self, how] : all) {
      how->self_ = self;
      how->refusal_ = join(lock, *how, after);
      if (how->refusal_) {
        if (!fails_validation(how->refusal_))
          self->mark_refused(lock, how->uses(), how->refusal_);
        how->count_refused(lock, how->refusal_);
      }
      if (how->self_) // else it may be freed with the operation
        after.add_placed(*how);
    }
  }
  finish(after);
  return refusal;
}

/// Checks a submission by itself.
caf::error admission::check_alone(locked lock, const operation& request, rank_submission& how,
                                  queue_bound bound) {
  auto op = how.alone(lock, bound);
  if (!op)
    return op.error();
  const bool first = (*op)->admitted_at == 0;
  if (auto error = check_lanes(lock, **op, first && (*op)->bounded(), bound); error)
    return error;
  return check_uses(lock, request, **op, how.uses());
}

void admission::bring_up_to_date(locked lock, deferred_actions& after) {
  auto* last =
      queue_.load(std::memory_order_relaxed) != nullptr ? queue_.exchange(nullptr) : nullptr;
  // After the exchange: an operation that failed before a submission came must not delay that one.
  if (auto failed = operation::failed_off_lanes(); failed != failed_) {
    failed_ = failed;
    remove_failed(lock, after);
  }
  if (last != nullptr)
    place_all(lock, last, after);
}

void admission::place_all(locked lock, rank_submission* last, deferred_actions& after) {
  // The list begins with the newest submission.
  rank_submission* in_order = nullptr;
  std::size_t count = 0;
  for (auto* x = last; x != nullptr; ++count) {
    auto* next = x->next_;
    x->next_ = in_order;
    in_order = x;
    x = next;
  }
  std::array<rank_submission*, most_together> some;
  auto all = std::span{some}.first(count <= some.size() ? count : 0);
  auto* one = in_order;
  for (auto& x : all)
    x = std::exchange(one, one->next_);
  if (!all.empty() && place_whole(lock, all, after))
    return;
  while (in_order != nullptr) {
    auto* x = std::exchange(in_order, in_order->next_);
    auto& request = *x->self_;
    x->refusal_ = request.completed() ? request.error() : join(lock, *x, after);
    // For its caller, the error comes after the call has returned: mark the ranges even if
    // validation failed. A cancelled operation leaves no mark, on any rank.
    if (x->refusal_ && x->self_) {
      if (code_of(x->refusal_) != errc::cancelled)
        request.mark_refused(lock, x->uses(), x->refusal_);
      x->count_refused(lock, x->refusal_);
    }
    if (x->self_) // else it may be freed with the operation
      after.add_placed(*x);
  }
}

bool admission::place_whole(locked lock, std::span<rank_submission* const> all,
                            deferred_actions& after) {
  auto op = all.front()->whole(lock, all);
  if (!op || check_lanes(lock, *op, op->bounded(), queue_bound::second))
    return false;
  for (auto* x : all)
    if (check_uses(lock, *x->self_, *op, x->uses()))
      return false;
  if (op->on_admit(lock, queue_bound::second))
    return false;
  // `after_placing` wakes the lanes once, for the last submission.
  auto* last = all.back();
  auto keep = last->self_;
  auto now = all.front()->self_->admitted_at;
  all.front()->join_whole(lock, all, op);
  bool held = false;
  commit(lock, op, now, held, after);
  last->self_ = std::move(keep);
  if (!held)
    last->complete_ = std::move(op);
  after.add_placed(*last);
  return true;
}

caf::error admission::join(locked lock, rank_submission& one, deferred_actions& after) {
  auto found = one.joint(lock);
  if (!found)
    return found.error();
  auto* joint = *found;
  bool first = joint->admitted_at == 0;
  // The caller has already waited for room, or was refused. Other threads may have added operations
  // since then: apply only the second bound.
  if (auto error = check_lanes(lock, *joint, first && joint->bounded(), queue_bound::second); error)
    return error;
  if (auto error = check_uses(lock, *one.self_, *joint, one.uses()); error)
    return error;
  if (!first && held_.would_wait_for_itself(lock, *joint, one.uses()))
    return one.refuse_cycle();
  if (first) {
    if (auto error = joint->on_admit(lock, queue_bound::second); error)
      return error;
    joint->admitted(lock, one.self_->admitted_at);
    deadlines_.add(*joint);
    expect_parts(lock, *joint);
    held_.add({{}, std::static_pointer_cast<operation>(joint->shared_from_this())});
  }
  auto there = joint->uses().size();
  auto self = one.self_;
  if (one.join(lock, self))
    one.self_ = nullptr;
  auto& held = *held_.find(*joint);
  for (auto& u : std::span{joint->uses()}.subspan(there)) {
    order_uses(lock, held.op, held, {&u, 1}, true);
    note_use(lock, held.op, held, u, ++last_access_, true);
  }
  held_.note_inversion(held);
  if (joint->waits_for(lock) != nullptr || is_away(lock, *joint) ||
      !std::ranges::all_of(held.behind, [&](auto& x) { return keeps_order_behind(lock, *x); }))
    return {};
  one.complete_ = std::move(held.op);
  one.self_ = std::move(self);
  held_.erase(held);
  submit(lock, *joint, after);
  return {};
}

void admission::finish(deferred_actions& after) {
  if (!after.gone.empty() || after.placed() != nullptr)
    process_room.notify();
  for (auto& x : after.gone)
    lane::wake_to_work(x.op->parts());
  for (auto& x : after.failed) // first: settling a dropped part's operation may wait for its reply
    x.who->answer(x.cause);
  let_go(after.too_late);
  after_placing(after.placed());
}

void admission::after_placing(rank_submission* done) {
  bool any_complete = false;
  for (auto* x = done; x != nullptr; x = x->next_)
    if (auto op = std::move(x->complete_)) {
      lane::wake_to_work(op->parts());
      any_complete = true;
    }
  while (done != nullptr) {
    auto& x = *std::exchange(done, done->next_);
    auto keep = std::move(x.self_);
    x.placed(x.refusal_);
  }
  if (any_complete)
    go_on_behind();
}

void admission::submit(locked lock, operation& op, deferred_actions& after) {
  op.submitted(lock);
  for (auto& p : op.parts())
    if (!p.on->submit(lock, p))
      after.too_late.push_back(&p);
}

/// Withdraws operations that failed before they were on the lanes: they do nothing there. To wait
/// for such an operation has no purpose, and may never end: its predecessor may wait for a call
/// that is made only after the waiting operation. All operations behind it are held as well, so
/// their order can still be changed.
/// The steps: operations that fail with it withdraw too; the marks of its ranges move to where they
/// belong; no operation follows a withdrawn one; the other operations follow the accesses that it
/// had superseded; the lanes may let it settle.
void admission::remove_failed(locked lock, deferred_actions& after) {
  const auto first = static_cast<std::ptrdiff_t>(after.gone.size());
  // Fail readers of ranges that will never be written, before they are sent to the lanes. Repeat,
  // since one operation may pass a marked range on to another.
  for (bool again = true; again;) {
    const auto before = static_cast<std::ptrdiff_t>(after.gone.size());
    again = held_.erase_if([&](held_operation& x) {
      if (!x.op->failed())
        return false;
      x.op->remove_from_order(lock);
      after.gone.push_back(std::move(x));
      return true;
    });
    std::vector<operation::dependent_failure> dependent_failures;
    std::for_each(after.gone.begin() + before, after.gone.end(),
                  [&](held_operation& x) { x.op->add_readers(dependent_failures); });
    for (auto x = after.gone.begin() + first; x != after.gone.end(); ++x) {
      again |= x->op->restore_unreadable(lock, dependent_failures);
      if (x >= after.gone.begin() + before)
        again |= x->op->leave_skipped(lock, dependent_failures);
    }
    for (auto& x : dependent_failures)
      x.who->fail_unanswered(x.cause, after.failed);
  }
  auto gone = std::span{after.gone}.subspan(static_cast<std::size_t>(first));
  if (gone.empty())
    return;
  held_.forget_withdrawn_predecessors(lock);
  held_.restore_superseded(lock, gone);
  for (auto& x : gone) {
    x.op->let_successors_go(lock);
    for (auto& p : x.op->parts())
      std::ranges::move(std::exchange(p.predecessors, {}), std::back_inserter(after.not_awaited));
    submit(lock, *x.op, after);
  }
}

void admission::go_on() noexcept {
  asked_for_all_.store(true);
  go_on_behind();
}

void admission::go_on_behind() noexcept {
  // A completion in `release` calls this function again: then the thread inside repeats the loop.
  if (asked_.fetch_add(1) != 0)
    return;
  std::size_t asked = 0;
  do {
    asked = asked_.load();
    release(asked_for_all_.exchange(false));
  } while (!asked_.compare_exchange_strong(asked, 0));
}

void admission::go_on_soon() noexcept {
  // Many operations may end at once: one look at the held ones is enough.
  if (soon_.exchange(true))
    return;
  deadlines_.call_at(clock::now(), [self = weak_from_this()] {
    if (auto alive = self.lock()) {
      alive->soon_.store(false);
      alive->go_on();
    }
  });
}

void admission::release(bool all) noexcept {
  operations released;
  deferred_actions after;
  {
    admission_lock lock;
    bring_up_to_date(lock, after);
    for (auto& x : held_)
      if (all && !x.op->failed())
        if (auto error = x.op->on_check(lock); error)
          x.op->fail_unanswered(error, after.failed);
    if (all)
      remove_failed(lock, after);
    for (auto before = held_.size() + 1; held_.size() < before;) {
      before = held_.size(); // a late submission may be behind an operation with a later position
      held_.erase_if([&](held_operation& x) {
        if (!all && x.behind.empty())
          return false;
        std::erase_if(x.behind,
                      [&](const auto& other) { return keeps_order_behind(lock, *other); });
        if (!x.behind.empty() || x.op->failed() || x.op->waits_for(lock) != nullptr ||
            is_away(lock, *x.op) || x.op->on_check(lock))
          return false;
        submit(lock, *x.op, after);
        released.push_back(std::move(x.op));
        return true;
      });
    }
  }
  for (auto& op : released)
    lane::wake_to_work(op->parts());
  finish(after);
}

} // namespace troupe::detail
