/// Part of class `lane`: issues the parts in its queue, in order, and drops failed ones.

#include "lane/lane.hpp"
#include <troupe/error.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace troupe::detail {

namespace {

/// How many parts are issued before the lane polls for completions again.
constexpr int issue_batch = 16;

} // namespace

bool lane::issue_ready() {
  bool worked = state_->phase() == device_phase::resetting && drop_failed();
  if (is_held() || (!waiting_.empty() && is_lost()))
    return worked;
  // Users' streams may take long; the limit is for the lane's own.
  const auto limit = options_.in_flight_limit + streams_.users_parts();
  for (int i = 0; i < issue_batch && !waiting_.empty() && in_flight() < limit; ++i) {
    if (try_issue(*waiting_.front()) == verdict::held)
      break;
    worked = true;
    if (is_held())
      break;
  }
  end_run();
  return worked;
}

/// Drops failed parts while a reset holds up the queue: a part that never runs must not hold up
/// others, for which the reset may wait. After a device loss no failed part goes on in the next
/// generation.
bool lane::drop_failed() noexcept {
  std::vector<part*> dropped;
  std::erase_if(waiting_, [&](part* p) {
    auto& op = *p->of;
    bool stale = p->uses_memory || op.borrows_from(state_->ordinal());
    bool drops = op.withdrawn() || (op.failed() && (stale || away_));
    if (drops)
      dropped.push_back(p);
    return drops;
  });
  for (auto* p : dropped)
    if (p->of->withdrawn())
      skip(*p);
    else
      lose(*p, {});
  return !dropped.empty();
}

bool lane::is_held() noexcept {
  auto made = streams_.made();
  bool held = continuing_ != 0 && std::any_of(made.begin(), made.end(), [](const lane_stream* s) {
                return s->continuing != nullptr && s->continuing->of->holds_lane();
              });
  if (held != held_.load(std::memory_order_relaxed))
    held_.store(held, std::memory_order_relaxed);
  return held;
}

lane::verdict lane::try_issue(part& p) {
  auto& op = *p.of;
  choose_stream(p);
  auto holder = held_by(p);
  record_.held_by(holder.value_or(0));
  if (holder && !(op.withdrawn() && !stands_between(p)))
    return verdict::held;
  waiting_.pop_front();
  auto error = provide_stream_of(p);
  if (!joins_run(p))
    end_run();
  if (!prepare(p))
    return wait_for_owner(p);
  if (!op.claim_issue(p)) {
    skip(p);
    return verdict::gone;
  }
  // In the step that issues: a stale handle never reaches a launch (INV-2).
  if (!error)
    error = check_generation(p);
  if (!error && !op.lost_a_part())
    error = note(wait_for_what_is_before(p));
  if (owner_tells(error))
    return wait_for_owner(p);
  if (error || !op.begin_issue(p)) {
    lose(p, error);
    return verdict::gone;
  }
  p.at.store(part::state::issuing, std::memory_order_release);
  auto now = nanoseconds(clock::now());
  issuing_since_.store(now, std::memory_order_relaxed);
  if (in_lane_stream(p.stream) && streams_.stream_of(p).in_flight.empty() && nothing_before(p))
    operation::part_started(p, now); // the call itself may block
  issuing_.store(true);
  auto outcome = op.issue(p, *this);
  record_.issuing(p, state_->generation(), now); // while the device works
  if (!outcome) {
    operation::take_back_issue(p);
    if (p.stream == stream_kind::none && owner_tells(outcome.error())) {
      issuing_.store(!nothing_continues());
      return wait_for_owner(p);
    }
  }
  after_issue(p, outcome);
  issuing_.store(!nothing_continues());
  return verdict::gone;
}

/// Lets the operation of `p` make what its issue needs. If that fails, the operation does not run.
/// Returns false if the device is lost.
bool lane::prepare(part& p) {
  auto& op = *p.of;
  if (op.withdrawn() || op.failed())
    return true;
  auto why = note(op.prepare(p, *this));
  if (!why)
    return true;
  if (owner_tells(why))
    return false;
  why = in_full(p, why);
  op.take_back(early_end::expired, [&] { return why; });
  return true;
}

void lane::choose_stream(part& p) {
  if (p.stream == stream_kind::overlap)
    p.tenant = &streams_.overlaps()[stream_for_overlap(p)];
  else if (p.tenant != nullptr)
    p.tenant->stream = streams_.choose_stream(*p.tenant);
}

/// Returns which of the streams for launches that overlap is best for `p`: the one of its latest
/// predecessor there, or one without work, or one that is made now, or the one with least work.
std::size_t lane::stream_for_overlap(const part& p) {
  // The streams behind the first one are made late (`held_by`). In the compute stream, which has a
  // queue of its own, `p` waits as other launches do. This is enough: a part that begins to
  // continue later comes behind `p` in the order of all devices, so nothing that `p` waits for
  // needs it. A part that waits for nothing holds up a queue no longer than what is in its stream
  // already.
  if (!nothing_continues() && !nothing_before(p))
    return 0;
  const auto all = streams_.overlaps();
  const predecessor* latest = nullptr;
  std::optional<std::size_t> best;
  for (auto& x : p.predecessors) {
    if (x.at->on != this || x.at->over() ||
        (latest != nullptr && latest->of->number() > x.of->number()))
      continue;
    const auto i = std::ranges::find(all, streams_.index_of(*x.at), &stream_tenant::stream);
    if (i == all.end())
      continue;
    latest = &x;
    best = static_cast<std::size_t>(i - all.begin());
  }
  if (best)
    return *best;
  std::size_t least = SIZE_MAX;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (provide_late(all[i].stream)) // of those before it, none is without work
      break;
    const auto work = streams_.all()[all[i].stream].in_flight.size();
    if (work < least) {
      best = i;
      least = work;
    }
    if (work == 0)
      break;
  }
  return best.value_or(0);
}

caf::error lane::check_generation(const part& p) const {
  if (p.generation == 0 || p.generation == state_->live_generation())
    return {};
  for (auto& u : p.of->uses_of(p))
    if (u.part == p.index && u.memory->stale()) {
      // An operation that was admitted in time fails with the same cause as all others (INV-7).
      auto& home = u.memory->home();
      if (home.live_generation() == 0)
        if (auto reason = home.reason())
          return reason;
      auto why =
          p.of->describe(errc::stale_ref, "the device was reset or lost after the allocation");
      why.device = home.ordinal();
      why.generation = u.memory->generation();
      return make_error(std::move(why));
    }
  return {};
}

/// Puts the part back into the queue, until the owner reports the loss.
lane::verdict lane::wait_for_owner(part& p) {
  p.at.store(part::state::queued, std::memory_order_release);
  p.claimed.store(false);
  waiting_.push_front(&p);
  return verdict::held;
}

void lane::after_issue(part& p, const caf::expected<issue_outcome>& outcome) {
  auto& op = *p.of;
  if (!outcome) {
    auto why = in_full(p, note(outcome.error()));
    if (p.stream == stream_kind::none) {
      lose(p, why);
      return;
    }
    if (!owner_tells(why))
      op.part_lost(p, why);
    // Some of its work may be in the stream, and uses the memory until it is over.
    put_in_flight(p);
    return;
  }
  switch (*outcome) {
  case issue_outcome::enqueued:
    put_in_flight(p);
    break;
  case issue_outcome::finished:
    note_left();
    issuing_.store(!nothing_continues()); // before the result: its receiver finds the lane idle
    finish(p, nanoseconds(clock::now()));
    return;
  case issue_outcome::continues:
    p.at.store(part::state::issued, std::memory_order_release);
    record_.issued(p);
    streams_.stream_of(p).continuing = &p;
    ++continuing_;
    if (p.tenant != nullptr)
      ++p.tenant->in_flight;
    break;
  }
}

void lane::put_in_flight(part& p) {
  auto& s = streams_.stream_of(p);
  in_flight_.fetch_add(1, std::memory_order_relaxed);
  note_left(); // second: the part is counted at any time
  if (auto* who = streams_.tenant_of(p))
    ++who->in_flight;
  if (p.tenant != nullptr && !s.in_flight.empty() && s.in_flight.back()->tenant != p.tenant)
    p.behind_others.store(true, std::memory_order_relaxed);
  if (p.stream == stream_kind::peer)
    note_copy(s, p);
  s.in_flight.push_back(&p);
  run_.in = &s;
  ++run_.parts;
  if (!run_goes_on_after(p))
    end_run();
}

bool lane::proceed_continuing() {
  bool worked = false;
  // More streams may be made meanwhile.
  for (std::size_t i = 0; continuing_ != 0 && i < streams_.made().size(); ++i) {
    auto& s = *streams_.made()[i];
    if (s.continuing == nullptr)
      continue;
    auto& p = *s.continuing;
    auto outcome = p.of->proceed(p, *this);
    if (outcome && *outcome == issue_outcome::continues)
      continue;
    s.continuing = nullptr;
    --continuing_;
    if (p.tenant != nullptr)
      --p.tenant->in_flight;
    worked = true;
    after_issue(p, outcome);
    issuing_.store(!nothing_continues());
  }
  return worked;
}

void lane::skip(part& p) noexcept {
  p.of->make_placeholder(p);
  // The memory must also outlive what a user's stream does with it.
  const bool of_user = p.stream == stream_kind::user;
  if ((of_user || stands_between(p)) && !abandoned_.load()) {
    p.is_placeholder = true;
    static_cast<void>(note(wait_for_what_is_before(p)));
    put_in_flight(p);
    return;
  }
  note_left();
  set_skipped(p);
  record_.over(p, p.record != 0, state_->generation(), nanoseconds(clock::now()));
  p.of->on_part_over(p);
  p.of->part_over();
}

void lane::lose(part& p, const caf::error& why) noexcept {
  p.of->part_lost(p, why);
  skip(p);
}

void lane::begin_connecting() noexcept {
  connecting_until_.store(std::numeric_limits<std::int64_t>::max(), std::memory_order_relaxed);
}

void lane::end_connecting() noexcept {
  connecting_until_.store(nanoseconds(clock::now()), std::memory_order_relaxed);
}

} // namespace troupe::detail
