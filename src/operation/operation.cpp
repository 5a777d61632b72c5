#include "operation/operation.hpp"

#include "foundation/spin.hpp"
#include "operation/device_state.hpp"
#include "operation/retry_record.hpp"

#include <algorithm>
#include <optional>
#include <utility>

namespace troupe::detail {

namespace {

std::atomic<std::uint64_t> last_number{0};

part_state state_of(const part& p) noexcept {
  switch (p.at.load(std::memory_order_acquire)) {
  case part::state::queued:
  case part::state::issuing:
  case part::state::skipped:
  case part::state::dropped:
    return part_state::not_issued;
  case part::state::issued:
    return part_state::issued;
  case part::state::started:
    return part_state::started;
  case part::state::done:
    return part_state::done;
  }
  return part_state::not_issued;
}

flight_state flight_state_of(const part& p) noexcept {
  switch (p.at.load(std::memory_order_acquire)) {
  case part::state::queued:
  case part::state::skipped:
  case part::state::dropped:
    return flight_state::not_issued;
  case part::state::issuing:
    return flight_state::issuing;
  case part::state::issued:
    return flight_state::issued;
  case part::state::started:
    return flight_state::started;
  case part::state::done:
    return flight_state::done;
  }
  return flight_state::not_issued;
}

} // namespace

void part::end_drop() noexcept {
  if (!dropped())
    return;
  std::vector<predecessor> over;
  flag_lock lock{event_guard};
  at.store(state::skipped, std::memory_order_release);
  over.swap(predecessors);
}

operation::operation(const char* verb, std::size_t parts)
    : verb_(verb), number_(last_number.fetch_add(1, std::memory_order_relaxed) + 1),
      parts_(*this, parts), open_(static_cast<std::uint32_t>(parts)) {}

alignas(64) std::atomic<std::size_t> operation::failing_{0};
std::atomic<std::uint64_t> operation::failed_off_lanes_{0};

operation::~operation() {
  if (failed() && !settled()) // it was never admitted
    failing_.fetch_sub(1, std::memory_order_release);
}

void operation::draw_number() noexcept {
  number_ = last_number.fetch_add(1, std::memory_order_relaxed) + 1;
}

caf::expected<issue_outcome> operation::issue(part&, lane&) {
  return make_error(errc::internal, "this operation has nothing to issue");
}

caf::error operation::mark_end(part&, event_view event, stream_view stream,
                               backend_device& device) {
  return device.record(event, stream);
}

caf::expected<issue_outcome> operation::proceed(part&, lane&) {
  return make_error(errc::internal, "this operation does not issue in pieces");
}

caf::error operation::late() const {
  auto why = describe(errc::deadline_exceeded, "its deadline was over before it began");
  why.parts.clear();
  return make_error(std::move(why));
}

failure operation::describe(errc code, std::string detail) const {
  failure result{.code = code, .detail = std::move(detail), .verb = verb_, .operation = number_};
  if (parts().size() == 1 && parts().front().on != nullptr) {
    auto& only = parts().front();
    result.rank = only.rank;
    result.device = device_state_of(*only.on).ordinal();
    result.generation = device_state_of(*only.on).generation();
    if (only.rank < 0) // of a device, not of a world
      return result;
  }
  for (auto& p : parts()) {
    auto index = p.rank >= 0 ? static_cast<std::size_t>(p.rank) : p.index;
    if (result.parts.size() <= index)
      result.parts.resize(index + 1, part_state::uninvolved);
    result.parts[index] = state_of(p);
  }
  return result;
}

std::uint64_t operation::size_bytes() const noexcept {
  return element_type_ == flight_entry::no_type
             ? 0
             : elements_ * size_of(static_cast<dtype>(element_type_));
}

flight_entry operation::record_of(const part& p) const noexcept {
  flight_entry result;
  result.operation = number_;
  result.step = step_;
  result.verb = verb_;
  result.count = elements_;
  result.rank = p.rank;
  result.part = static_cast<std::uint32_t>(p.index);
  result.stream = static_cast<std::uint8_t>(p.stream);
  result.type = element_type_;
  result.admitted_at = admitted_at;
  result.progress.state = flight_state_of(p);
  for (auto& u : uses_of(p))
    if (u.part == p.index)
      result.add_ref({u.memory->id(), u.begin, u.end}, u.reads, u.writes);
  describe_to(result, p);
  return result;
}

std::vector<flight_entry> operation::open_records() const {
  std::vector<flight_entry> result;
  admission_lock order;
  std::lock_guard lock{guard_}; // `settle` takes this lock before it releases the buffers
  if (settled())
    return result;
  for (auto& p : parts()) {
    result.push_back(record_of(p));
    result.back().generation = device_state_of(*p.on).generation();
  }
  return result;
}

bool is_lost(locked lock, const part& p) noexcept {
  return device_state_of(*p.on).is_lost(lock, p.of->position()) && !(p.over() && p.of->settled());
}

bool may_follow_lost_work(locked lock, const operation& x) noexcept {
  return x.is_behind_lost(lock) && !x.settled() && device_state::any_has_lost_work(lock);
}

bool operation::has_lost_part(locked lock) const noexcept {
  return std::ranges::any_of(parts(), [&](const part& p) { return is_lost(lock, p); });
}

std::uint64_t operation::last_position_ = 0;

void operation::admitted(locked, std::int64_t now) {
  position_ = ++last_position_;
  admitted_at = now;
  self_ = std::static_pointer_cast<operation>(shared_from_this());
}

void operation::submitted(locked lock) {
  on_lanes_.store(true, std::memory_order_relaxed);
  if (!failed())
    on_submit(lock);
}

void operation::precede(const std::shared_ptr<operation>& successor, bool reads) {
  std::lock_guard lock{guard_};
  if (settled())
    return;
  if (!successors_.empty() && successors_.back().who == successor) {
    successors_.back().reads |= reads;
    return;
  }
  successor->open_.fetch_add(1, std::memory_order_relaxed);
  successors_.push_back({successor, reads});
}

std::vector<std::shared_ptr<operation>> operation::successors() const {
  std::vector<std::shared_ptr<operation>> result;
  std::lock_guard lock{guard_};
  for (auto& x : successors_)
    result.push_back(x.who);
  return result;
}

bool operation::shares_written_bytes(const operation& other) const noexcept {
  return std::ranges::any_of(uses_, [&](const use& x) {
    return x.writes && std::ranges::any_of(other.uses_, [&](const use& y) {
             return y.writes && x.memory == y.memory && x.begin < y.end && y.begin < x.end;
           });
  });
}

void operation::overwrites(locked, const std::shared_ptr<buffer>& memory,
                           const buffer::unreadable_range& x) {
  // Only the first cause of each byte counts. Otherwise a chain of failures would add one per link.
  for (auto& old : overwritten_)
    if (old.memory == memory && old.range.begin <= x.begin && x.end <= old.range.end &&
        (old.range.half_written() || !x.half_written())) {
      if (!old.range.half_written() && old.range.skipped_by != x.skipped_by)
        old.range.skipped_by = buffer::unreadable_range::several;
      return;
    }
  overwritten_.push_back({memory, x});
}

bool operation::restore_unreadable(locked lock,
                                   std::vector<dependent_failure>& dependent_failures) {
  auto overwritten = std::exchange(overwritten_, {});
  std::vector<follower> successors;
  if (!overwritten.empty()) {
    std::lock_guard guard{guard_};
    successors = successors_;
  }
  for (auto& x : overwritten)
    mark_unreadable(lock, x.memory, x.range, successors, dependent_failures);
  return !overwritten.empty();
}

bool operation::leave_skipped(locked lock, std::vector<dependent_failure>& dependent_failures) {
  if (cancelled() || !marks_skipped())
    return false;
  caf::error cause;
  std::vector<follower> successors;
  {
    std::lock_guard guard{guard_};
    cause = cause_;
    successors = successors_;
  }
  bool any = false;
  for (auto& u : uses_)
    if (u.writes) {
      mark_unreadable(lock, u.memory, {u.begin, u.end, cause, identity_of(u)}, successors,
                      dependent_failures);
      any = true;
    }
  return any;
}

void operation::mark_refused(locked, std::span<const use> uses, const caf::error& why) const {
  if (!marks_skipped())
    return;
  for (auto& u : uses)
    if (u.writes && u.begin < u.end)
      u.memory->mark({u.begin, u.end, why, identity_of(u)});
}

void operation::add_readers(std::vector<dependent_failure>& dependent_failures) const {
  if (cancelled())
    return;
  std::lock_guard lock{guard_};
  for (auto& next : successors_)
    if (next.reads)
      dependent_failures.push_back({next.who, cause_});
}

void operation::let_successors_go(locked) noexcept {
  std::lock_guard lock{guard_};
  std::erase_if(successors_, [](const follower& x) {
    if (x.who->is_removed())
      return false;
    x.who->open_.fetch_sub(1, std::memory_order_relaxed); // its parts are still open
    return true;
  });
}

std::vector<buffer::unreadable_range> operation::unreadable_before(const buffer& memory) const {
  std::vector<buffer::unreadable_range> result;
  for (auto& x : overwritten_)
    if (x.memory.get() == &memory)
      result.push_back(x.range);
  return result;
}

std::vector<buffer::unreadable_range> operation::unreadable_behind(locked, const buffer& memory,
                                                                   const part& p, std::size_t begin,
                                                                   std::size_t end) const {
  std::vector<buffer::unreadable_range> result;
  if (!failed() || settled() || is_delivered(p) || !never_issued(p))
    return result;
  for (auto& [of, x] : overwritten_)
    if (of.get() == &memory && x.begin < end && begin < x.end)
      result.push_back({std::max(begin, x.begin), std::min(end, x.end), x.cause, x.skipped_by});
  return result;
}

bool operation::claim_issue(part& p) noexcept {
  // Either this thread sees an attempt to withdraw, or the withdrawing thread sees `claimed`.
  p.claimed.store(true);
  auto seen = withdrawal_.load();
  for (; seen == withdrawal::tried; seen = withdrawal_.load())
    pause();
  if (seen == withdrawal::none)
    return true;
  p.claimed.store(false);
  return false;
}

/// Under guard_.
bool operation::withdraw(withdrawal as) noexcept {
  if (withdrawn())
    return false;
  withdrawal_.store(withdrawal::tried);
  bool too_late =
      std::any_of(parts().begin(), parts().end(), [](const part& p) { return p.claimed.load(); });
  withdrawal_.store(too_late ? withdrawal::none : as);
  return !too_late;
}

bool operation::any_issued() const noexcept {
  return std::any_of(parts().begin(), parts().end(), [](const part& p) { return p.begun.load(); });
}

void operation::cancel() noexcept {
  if (!completed())
    end_early(early_end::cancelled);
}

void operation::expire() noexcept {
  if (!completed())
    end_early(early_end::expired);
}

bool operation::take_back(early_end how, const std::function<caf::error()>& why) noexcept {
  auto keep = shared_from_this();
  std::vector<std::shared_ptr<operation>> readers;
  caf::error cause;
  {
    // One step: a lane that sees the withdrawal must find the cause when it settles the operation.
    std::lock_guard lock{guard_};
    if (is_decided() ||
        !withdraw(how == early_end::cancelled ? withdrawal::cancelled : withdrawal::done))
      return false;
    cause = why();
    note_cause(cause, readers);
  }
  answer(cause);
  for (auto& x : readers)
    x->fail(cause);
  return true;
}

failure operation::early_failure(early_end how) const {
  return how == early_end::cancelled
             ? describe(errc::cancelled, "cancelled by its requester")
             : describe(errc::deadline_exceeded, "not done before its deadline");
}

caf::error operation::early_answer(early_end how, bool runs_on) const {
  auto why = early_failure(how);
  why.detail += runs_on ? "; it was issued, and runs on" : "; it was not issued, and does not run";
  // If a lane has reached its part, it is about to issue it.
  for (auto& p : parts())
    if (auto index = p.rank >= 0 ? static_cast<std::size_t>(p.rank) : p.index;
        index < why.parts.size() && why.parts[index] == part_state::not_issued && p.claimed.load())
      why.parts[index] = part_state::issued;
  return make_error(std::move(why));
}

void operation::end_early(early_end how) noexcept {
  if (!take_back(how, [&] { return early_answer(how, false); }))
    answer(early_answer(how, true));
}

void operation::note_cause(const caf::error& why,
                           std::vector<std::shared_ptr<operation>>& readers) noexcept {
  cause_ = why;
  if (retries_)
    retries_->begin_wait();
  failing_.fetch_add(1, std::memory_order_release);
  failed_.store(true, std::memory_order_release);
  if (!on_lanes())
    failed_off_lanes_.fetch_add(1, std::memory_order_release);
  if (cancelled()) // its successors go on
    return;
  for (auto& next : successors_)
    if (next.reads)
      readers.push_back(next.who);
}

bool operation::set_cause(const caf::error& why,
                          std::vector<std::shared_ptr<operation>>& readers) noexcept {
  std::lock_guard lock{guard_};
  if (is_decided())
    return false;
  withdraw(withdrawal::done);
  note_cause(why, readers);
  return true;
}

void operation::fail(const caf::error& cause) noexcept {
  std::vector<dependent_failure> failed;
  fail_unanswered(cause, failed);
  for (auto& x : failed)
    x.who->answer(x.cause);
}

void operation::fail_unanswered(const caf::error& cause,
                                std::vector<dependent_failure>& failed) noexcept {
  // A chain of operations may be long: do not recurse.
  std::vector<std::shared_ptr<operation>> open{
      std::static_pointer_cast<operation>(shared_from_this())};
  while (!open.empty()) {
    auto x = std::move(open.back());
    open.pop_back();
    if (x->set_cause(cause, open))
      failed.push_back({std::move(x), cause});
  }
}

caf::error operation::cause() const {
  std::lock_guard lock{guard_};
  return cause_;
}

void operation::part_lost(part& p, const caf::error& why) noexcept {
  lost_.store(true);
  if (any_issued())
    on_lost_part(p, why);
  if (why)
    fail(why);
}

void operation::make_placeholder(part& p) noexcept {
  has_placeholder_.store(true, std::memory_order_release);
  if (has_parts_elsewhere())
    on_lost_part(p, {});
}

std::int64_t operation::first_started_at() const noexcept {
  auto result = counted_from_.load(std::memory_order_acquire);
  if (result == 0)
    for (auto& p : parts())
      if (auto at = p.started_at.load(std::memory_order_acquire); at != 0)
        result = result == 0 ? at : std::min(result, at);
  return result;
}

bool operation::decide() noexcept {
  std::lock_guard lock{guard_};
  if (failed())
    return false;
  stage_.store(stage::succeeds);
  return true;
}

std::shared_ptr<operation> operation::settle() noexcept {
  std::vector<std::shared_ptr<operation>> follow_up;
  auto result = settle(follow_up);
  while (!follow_up.empty()) {
    auto x = std::move(follow_up.back());
    follow_up.pop_back();
    if (x->one_over())
      x->settle(follow_up);
  }
  return result;
}

std::shared_ptr<operation>
operation::settle(std::vector<std::shared_ptr<operation>>& follow_up) noexcept {
  auto keep = std::move(self_);
  const bool succeeds = decide();
  if (succeeds)
    on_success();
  const auto cause = succeeds ? caf::error{} : this->cause();
  std::vector<follower> successors;
  std::vector<dependent_failure> dependent_failures;
  {
    // An operation that is admitted later must see the marks as soon as this one is settled.
    std::optional<admission_lock> order;
    if (cause)
      order.emplace();
    {
      std::lock_guard lock{guard_};
      stage_.store(stage::settled, std::memory_order_release);
      successors.swap(successors_);
    }
    if (order)
      dependent_failures = mark_buffers(*order, cause, successors);
  }
  if (cause)
    for (auto& p : parts())
      p.end_drop();
  overwritten_.clear();
  for (auto& u : uses_) // a look at the part takes no cache line of a buffer
    if (u.writes && parts()[u.part].generation == part::several_generations)
      u.memory->end_write();
  uses_.clear(); // the requester may drop the last handles after the answer
  if (!cause)
    answer({});
  std::atomic_thread_fence(std::memory_order_seq_cst); // as in `deadline_watch::add_late`
  if (auto* keeper = kept_by_.load(std::memory_order_acquire))
    keeper->remove(*this);
  on_settled();
  if (cause && !cancelled())
    for (auto& x : successors)
      if (x.reads)
        x.who->fail(cause);
  for (auto& x : dependent_failures)
    x.who->fail(x.cause);
  if (failed()) // not earlier: until then a successor may complete without its mark
    failing_.fetch_sub(1, std::memory_order_release);
  for (auto& x : successors)
    follow_up.push_back(std::move(x.who));
  return keep;
}

std::vector<operation::dependent_failure>
operation::mark_buffers(locked lock, const caf::error& cause,
                        const std::vector<follower>& successors) {
  std::vector<dependent_failure> result;
  auto is_delivered = [this](const use& u) { return detail::is_delivered(parts()[u.part]); };
  for (auto& x : overwritten_)
    if (std::none_of(uses_.begin(), uses_.end(), [&](const use& u) {
          return u.memory == x.memory && u.writes && is_delivered(u) && u.begin <= x.range.begin &&
                 x.range.end <= u.end;
        }))
      mark_unreadable(lock, x.memory, x.range, successors, result);
  const bool skips = marks_skipped() && !cancelled() && !removed_; // else they are marked
  for (auto& u : uses_) {
    if (!u.writes || is_delivered(u))
      continue;
    if (parts()[u.part].at.load(std::memory_order_acquire) == part::state::done)
      mark_unreadable(lock, u.memory, {u.begin, u.end, cause}, successors, result);
    else if (skips)
      mark_unreadable(lock, u.memory, {u.begin, u.end, cause, identity_of(u)}, successors, result);
  }
  return result;
}

void operation::mark_unreadable(locked lock, const std::shared_ptr<buffer>& memory,
                                const buffer::unreadable_range& x,
                                const std::vector<follower>& successors,
                                std::vector<dependent_failure>& dependent_failures) {
  // A successor that reads the range fails, also behind one that was withdrawn. A successor that
  // writes it takes the mark over: it overwrites the range, or fails and passes the mark on.
  std::vector<buffer::unreadable_range> open;
  if (x.begin < x.end)
    open.push_back(x);
  for (auto& next : successors) {
    if (next.who->is_removed() && next.who->on_lanes())
      continue; // no operation follows it any more; while it is leaving, one may
    for (auto& u : next.who->uses_) {
      if (u.memory != memory)
        continue;
      if (u.reads)
        for (auto& w : open)
          if (w.begin < u.end && u.begin < w.end && !u.accepted.includes(w.skipped_by))
            dependent_failures.push_back({next.who, w.cause});
      if (!u.writes)
        continue;
      for (auto& w : cut_out(open, u.begin, u.end))
        next.who->overwrites(lock, memory, w);
    }
  }
  for (auto& w : open)
    memory->mark(w);
}

} // namespace troupe::detail
