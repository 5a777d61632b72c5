#include "collective/rank_request.hpp"

#include "admission/deadline_watch.hpp"
#include "collective/collective_operation.hpp"
#include "collective/collective_world.hpp"
#include "collective/collective_writes.hpp"
#include "collective/rank_matching.hpp"
#include "lane/lane.hpp"
#include "operation/admission_lock.hpp"
#include "operation/device_state.hpp"
#include "operation/skipping.hpp"
#include "runtime/runtime.hpp"

#include <algorithm>
#include <map>
#include <utility>

namespace troupe::detail {

void rank_request::begin(const char* verb, std::shared_ptr<collective_world> world, rank_call call,
                         rank_set absent, const request_options& options) {
  operation_of::begin(verb);
  world_ = std::move(world);
  call_ = std::move(call);
  membership_ = options.membership;
  absent_ = absent;
  add_uses(call_, slot_of(call_, absent_).part, [&](use x) {
    x.accepted = skipped_reads::of(options.retry_of);
    uses_[use_count_++] = std::move(x);
  });
  call_.send = call_.recv = {}; // the handles belong to the caller
}

std::uint64_t rank_request::number() const noexcept {
  auto number = joint_number_.load(std::memory_order_relaxed);
  return number != 0 ? number : operation::number();
}

caf::expected<operation*> rank_request::joint(locked lock) {
  // Check the membership first: a call for another membership is unrelated to the others' calls.
  if (auto error = world_->check_view(lock, *this, membership_, absent_); error)
    return error;
  auto& line = world_->matching().line_of(lock, call_);
  auto caller = rank_matching::caller_of(call_);
  auto* next = line.next_of(caller);
  for (; next != nullptr; next = line.next_of(caller)) {
    auto gone = next->why_ended(lock);
    if (!gone)
      break;
    const auto membership = next->first_membership();
    line.take(caller, next->op); // consumes this rank's call of the ended operation
    if (membership_ == 0 || membership == membership_) {
      counts_ = true;
      return gone;
    }
    world_->matching().passed_over(lock, call_); // this call means a later membership
  }
  if (next != nullptr) {
    if (auto error = next->op->check_call(lock, call_, uses(), membership_); error)
      return error;
    found_ = next->op;
  } else {
    if (auto error = check_line(line.ahead(caller), queue_bound::second); error)
      return error;
    found_ = made_ ? std::move(made_) : make_joint(lock);
  }
  return found_.get();
}

/// Returns no error if one more call may wait in its call queue, where `ahead` calls wait already.
caf::error rank_request::check_line(std::size_t ahead, queue_bound bound) const {
  auto limit = limit_of(world_->limits().waiting_limit, bound);
  if (ahead < limit)
    return {};
  return make_error(
      describe_call(errc::overloaded,
                    std::to_string(limit) + " calls of this rank wait for calls of other ranks"));
}

const lane& rank_request::own_lane() const { return *world_->lanes()[call_.rank]; }

/// Checks for room in the rank's queues.
caf::error rank_request::check_room(locked lock, queue_bound bound) const {
  auto& matching = world_->matching();
  auto& line = matching.line_of(lock, call_);
  auto caller = rank_matching::caller_of(call_);
  auto ahead = line.ahead(caller);
  auto awaited = line.awaited(caller); // others' calls wait for these: they add nothing to a queue
  auto& queue = own_lane();
  if (awaited == 0) {
    if (auto error = check_line(ahead, bound); error)
      return error;
    if (!queue.accepts(lock, bound))
      return make_error(
          describe_call(errc::overloaded, std::to_string(limit_of(queue.queue_limit(), bound)) +
                                              " operations already wait for the device"));
  }
  if (call_.is_message())
    return {};
  auto left = [](std::size_t limit, std::size_t there) { return limit - std::min(limit, there); };
  auto room = std::min(left(limit_of(world_->limits().waiting_limit, bound), ahead),
                       left(limit_of(queue.queue_limit(), bound), queue.queued()));
  matching.set_credit(call_.rank, room + awaited - 1);
  return {};
}

room_maker rank_request::who_makes_room(locked lock, queue_bound bound) const {
  auto& matching = world_->matching();
  if (!check_line(matching.line_of(lock, call_).ahead(rank_matching::caller_of(call_)), bound))
    return world_->owner()->admissions().who_makes_room(lock, own_lane());
  return matching.maker_of_missing(lock, call_);
}

/// Waits for room in the rank's own queues. Calls that other threads add meanwhile are accepted.
caf::error rank_request::wait_for_room(room_policy room) {
  auto& matching = world_->matching();
  matching.note_caller(call_.rank);
  if (!call_.is_message() && matching.take_credit(call_.rank))
    return {};
  const auto how = choose_room(room);
  auto& admissions = world_->owner()->admissions();
  return find_room(
      how, deadline,
      [&]() -> caf::error {
        admissions.drain();
        return check_room(admission_lock{}, how.bound);
      },
      [&] { return who_makes_room(admission_lock{}, how.bound); });
}

caf::expected<operation*> rank_request::alone(locked lock, queue_bound bound) {
  if (auto error = world_->check_view(lock, *this, membership_, absent_); error)
    return error;
  auto& line = world_->matching().line_of(lock, call_);
  auto caller = rank_matching::caller_of(call_);
  auto awaited = std::min(before_, line.awaited(caller)); // other ranks have already made these
  if (auto error = check_line(line.ahead(caller) + before_ - awaited, bound); error)
    return error;
  auto* there = line.next_of(caller, before_);
  if (there != nullptr && there->op) // it adds nothing to a queue
    return there->op.get();
  made_ = make_joint(lock);
  return made_.get();
}

void rank_request::count_refused(locked lock, const caf::error& why) {
  if (counts_ || !world_->counts_calls_of(lock, call_) || !counts_among_calls(why, membership_))
    return;
  counts_ = true;
  ended_ = world_->matching().count_refused(lock, call_, why, world_->membership(lock));
}

void rank_request::note_refused(locked lock, const caf::error& why) {
  if (!fails_validation(why))
    mark_refused(lock, uses(), why);
  count_refused(lock, why);
  if (counts_)
    world_->matching().passed_over(lock, call_);
}

void rank_request::end_refused(const caf::error& why) {
  if (auto op = std::move(ended_))
    op->fail(why);
  made_.reset();
  answer(why);
}

std::shared_ptr<collective_operation> rank_request::make_joint(locked lock) {
  const bool of_all = !call_.is_message() && absent_.empty();
  if (auto ready = of_all ? world_->matching().joint_pool.take() : nullptr) {
    ready->begin(lock, world_->self(), call_);
    return ready;
  }
  return std::make_shared<collective_operation>(lock, world_->self(), call_, absent_);
}

failure rank_request::describe_call(errc code, std::string detail) const {
  auto why = describe(code, std::move(detail));
  why.operation = number();
  why.rank = static_cast<int>(call_.rank);
  why.device = world_->lanes()[call_.rank]->state().ordinal();
  return why;
}

caf::error rank_request::refuse_cycle() {
  return make_error(describe_call(errc::collective_mismatch,
                                  "a buffer of the call waits for calls of other ranks, "
                                  "which wait for this call: a deadlock"));
}

const void* rank_request::match_key() const noexcept {
  return call_.is_message() ? nullptr : world_.get();
}

std::shared_ptr<operation> rank_request::whole(locked lock, std::span<rank_submission* const> all) {
  std::uint64_t seen = 0;
  if (all.size() != world_->size() - absent_.size() || call_.plan ||
      world_->matching().waits_for_calls(lock))
    return nullptr;
  for (auto* x : all) {
    if (x->match_key() != world_.get())
      return nullptr;
    auto& other = static_cast<const rank_request&>(*x);
    auto bit = std::uint64_t{1} << other.call_.rank;
    if ((seen & bit) != 0 || other.membership_ != membership_ || other.absent_ != absent_ ||
        other.completed() || !alike(call_, other.call_))
      return nullptr;
    seen |= bit;
  }
  auto result = make_joint(lock);
  if (world_->check_view(lock, *result, membership_, absent_))
    return nullptr;
  return result;
}

void rank_request::become_part_of(locked lock, std::shared_ptr<collective_operation> joint,
                                  std::shared_ptr<operation> self) {
  joint_ = std::move(joint);
  counts_ = true;
  joint_number_.store(joint_->number(), std::memory_order_relaxed);
  joint_->add_call(lock, call_, std::span{uses_}.first(use_count_), membership_,
                   std::static_pointer_cast<rank_request>(std::move(self)));
  use_count_ = 0;
}

void rank_request::join_whole(locked lock, std::span<rank_submission* const> all,
                              const std::shared_ptr<operation>& joint) {
  auto op = std::static_pointer_cast<collective_operation>(joint);
  for (auto* x : all) {
    auto& request = static_cast<rank_request&>(*x);
    request.become_part_of(lock, op, request.take_self());
  }
  world_->matching().collectives(lock).take_of_all();
}

bool rank_request::join(locked lock, std::shared_ptr<operation> self) {
  world_->matching().line_of(lock, call_).take(rank_matching::caller_of(call_), found_);
  become_part_of(lock, std::move(found_), std::move(self));
  return !joint_->completed(); // if it has completed, only `placed` can complete this request
}

bool rank_request::succeed() noexcept { return answer({}); }

/// Only the thread whose answer counts writes `value`: several may try at the same time.
void rank_request::before_answer(const caf::error& error) noexcept {
  if (!error)
    value = joint_->value;
}

void rank_request::start(room_policy room) {
  if (auto error = wait_for_room(room); error) {
    note_refused(admission_lock{}, error);
    return end_refused(error);
  }
  admitted_at = clock::now().time_since_epoch().count();
  auto& admissions = world_->owner()->admissions();
  auto self = std::static_pointer_cast<rank_request>(shared_from_this());
  admissions.enqueue(self, *this);
  // The thread of the last rank places the calls of all ranks, at once.
  auto& matching = world_->matching();
  if (call_.is_message()) {
    admissions.drain();
  } else if (matching.handed_in(call_.rank, absent_)) {
    admissions.drain();
  } else {
    admissions.drain_soon();
  }
  watch();
}

admission::submission rank_request::begin_together(std::size_t before) {
  world_->matching().note_caller(call_.rank);
  admitted_at = clock::now().time_since_epoch().count();
  before_ = before;
  return {std::static_pointer_cast<operation>(shared_from_this()), this};
}

void rank_request::watch() {
  auto& deadlines = world_->owner()->deadlines();
  deadlines.add(*this);
  if (completed())
    deadlines.remove(*this);
}

void rank_request::placed(const caf::error& why) {
  auto& runtime = *world_->owner();
  if (!counts_ && !call_.is_message())
    world_->matching().refused(call_.rank);
  if (why || !joint_) {
    found_.reset();
    if (why)
      end_refused(why);
    runtime.deadlines().remove(*this);
    return;
  }
  if (completed()) // before it had its position
    joint_->take_back(code_of(error()) == errc::cancelled ? early_end::cancelled
                                                          : early_end::expired,
                      [this] { return error(); });
  if (joint_->completed())
    end();
}

void rank_request::end() noexcept {
  if (!completed())
    answer(joint_->error());
  auto& owner = *world_->owner();
  owner.deadlines().remove(*this);
  if (!joint_->on_lanes())
    owner.admissions().go_on_soon(); // other operations need not wait for it
}

void rank_request::end_early(early_end how) noexcept {
  auto why = early_failure(how);
  end_early(how, why.code, why.detail);
}

/// Ends the request early. While nothing of its operation is issued, the calls of all ranks end
/// with it: one rank cannot end alone.
void rank_request::end_early(early_end how, errc code, const std::string& detail) noexcept {
  world_->owner()->admissions().drain();
  std::shared_ptr<collective_operation> joint;
  std::string missing;
  {
    admission_lock lock;
    joint = joint_;
    missing = joint ? joint->missing_ranks(lock) : std::string{};
  }
  auto why = [&](const char* outcome) {
    auto cause = describe_call(code, detail);
    cause.detail += missing.empty() ? outcome : "; not called by " + missing;
    return make_error(std::move(cause));
  };
  if (!joint)
    answer(why(""));
  else if (!joint->take_back(how, [&] { return why("; it was not issued, and does not run"); }))
    answer(why("; it was issued, and runs on"));
  else
    answer(joint->error());
}

void rank_request::end_beside(early_end how, const caf::error& why) noexcept {
  if (!completed())
    end_early(how, errc::cancelled,
              (how == early_end::cancelled ? "its exchange ended: "
                                           : "another message of its exchange failed: ") +
                  troupe::describe(why));
}

// -- exchange_request

exchange_request::exchange_request(std::shared_ptr<runtime> owner,
                                   std::vector<std::shared_ptr<rank_request>> requests)
    : operation_of("exchange", 0), owner_(std::move(owner)), requests_(std::move(requests)),
      left_(requests_.size()) {}

void exchange_request::start(room_policy room) {
  auto self = std::static_pointer_cast<exchange_request>(shared_from_this());
  std::map<std::pair<std::int32_t, collective_kind>, std::size_t> lines;
  std::vector<admission::submission> all;
  all.reserve(requests_.size());
  for (auto& x : requests_) {
    x->on_answer([self, request = x.get()] { self->on_answer_of(*request); });
    all.push_back(x->begin_together(lines[{x->peer(), x->what()}]++));
  }
  const auto how = choose_room(room);
  auto why = find_room(
      how, requests_.front()->deadline,
      [&] { return owner_->admissions().place_together(all, how.bound); },
      [&] {
        admission_lock lock;
        auto result = room_maker::others;
        for (auto& x : requests_)
          result = std::max(result, x->who_makes_room(lock, how.bound));
        return result;
      });
  if (why) {
    {
      admission_lock lock;
      for (auto& x : requests_)
        x->note_refused(lock, why);
    }
    answer(why);
    for (auto& x : requests_)
      x->end_refused(why);
    return;
  }
  for (auto& x : requests_)
    x->watch();
  auto& deadlines = owner_->deadlines();
  on_answer([owner = owner_, weak = std::weak_ptr{self}] {
    if (auto x = weak.lock())
      owner->deadlines().remove(*x);
  });
  deadlines.add(*this);
  if (completed())
    deadlines.remove(*this);
}

void exchange_request::on_answer_of(const rank_request& x) noexcept {
  if (!x.error()) {
    if (left_.fetch_sub(1) == 1) {
      value = requests_.back()->value;
      answer({});
    }
    return;
  }
  if (!answer(x.error()))
    return;
  // The completing thread may hold the admission lock: end the others on the deadline watch's
  // thread.
  auto self = std::static_pointer_cast<exchange_request>(shared_from_this());
  const auto how = early_end::expired; // the ranges that they would have written are skipped
  owner_->deadlines().call_at(clock::now(),
                              [self, how, why = x.error()] { self->end_all(how, why); });
}

void exchange_request::end_all(early_end how, const caf::error& why) noexcept {
  for (auto& x : requests_)
    x->end_beside(how, why);
}

void exchange_request::end_early(early_end how) noexcept {
  auto why = make_error(early_failure(how));
  answer(why);
  end_all(how, why);
}

} // namespace troupe::detail
