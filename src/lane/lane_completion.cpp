/// Part of class `lane`: polls the events of its streams, and finishes the parts that are over.

#include "foundation/spin.hpp"
#include "lane/kept_result.hpp"
#include "lane/lane.hpp"
#include "lane/retired_operations.hpp"
#include <troupe/error.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <ranges>
#include <utility>

namespace troupe::detail {

namespace {

/// How many operations one event query settles at most, and one look at a stream: the other streams
/// do not wait while many operations of one end with an error, which takes about 6 us for each.
constexpr std::size_t poll_batch = 8;
/// The oldest event is queried after an event further back was not done for this long.
constexpr std::chrono::microseconds poll_patience{100};

/// Returns the number of parts in the stream up to this one.
std::size_t place_of(const part& p, const lane_stream& in) noexcept {
  return static_cast<std::size_t>(std::ranges::find(in.in_flight, &p) - in.in_flight.begin()) + 1;
}

} // namespace

void lane::note_started(lane_stream& s) noexcept {
  if (s.in_flight.empty())
    return;
  auto& p = *s.in_flight.front();
  if (p.at.load(std::memory_order_relaxed) != part::state::issued)
    return;
  if (!nothing_before(p))
    return;
  p.at.store(part::state::started, std::memory_order_release);
  auto now = nanoseconds(clock::now());
  record_.started(p, now);
  if (p.of->stall_limit != 0)
    operation::part_started(p, now);
}

bool lane::poll() {
  bool worked = false;
  for (auto* s : streams_.made())
    if (!s->in_flight.empty())
      worked |= s->is_ordered() ? poll(*s) : poll_each(*s);
  return worked;
}

/// Polls some of the parts in `s`, which end in any order.
bool lane::poll_each(lane_stream& s) {
  bool worked = false;
  for (auto left = std::min(s.in_flight.size(), poll_batch); left != 0 && !s.in_flight.empty();
       --left) {
    worked |= poll(s);
    std::ranges::rotate(s.in_flight, std::ranges::next(s.in_flight.begin(), 1, s.in_flight.end()));
  }
  return worked;
}

bool lane::poll(lane_stream& s) {
  std::size_t finished = 0;
  bool one_by_one = device_->signals_completion() || !s.is_ordered();
  while (!s.in_flight.empty() && finished < poll_batch) {
    // To query an event that is done costs more than one that is not. So query one further back,
    // the last one of few: if it is done, all before it are done too.
    const auto size = s.in_flight.size();
    auto batch = one_by_one ? 1 : size < poll_batch ? size : std::min(size / 2, poll_batch);
    auto& p = *s.in_flight[batch - 1];
    const bool has_event = p.event.native != nullptr;
    auto done = has_event ? device_->query(p.event) : caf::expected<bool>{false};
    if (batch != 1 && !(has_event && done)) {
      one_by_one = true; // those before it may be done; find the one that failed
      continue;
    }
    if (!has_event)
      return finished != 0; // the end of the device or the process, which follows, drops it
    auto of_its_run = [event = p.event.native](const part* x) { return x->event.native == event; };
    if (!done) {
      static_cast<void>(note(done.error()));
      if (auto code = code_of(done.error());
          code == errc::device_fault || code == errc::worker_lost)
        // The streams may still run: only the end of device or process drops it.
        return finished != 0;
      for (auto* x : s.in_flight | std::views::take_while(of_its_run))
        x->of->fail(x->of->on_failed_work(*x, in_full(*x, done.error())));
      // The work may still run, and uses its memory until it is over.
      if (auto error = device_->synchronize(p.event)) {
        static_cast<void>(note_fault(error));
        return finished != 0;
      }
      done = true;
    }
    if (!*done) {
      note_started(s);
      if (batch == 1 || of_its_run(s.in_flight.front()))
        return finished != 0;
      auto now = clock::now();
      if (s.not_done_since == clock::time_point{})
        s.not_done_since = now;
      if (batch == poll_batch && now < s.not_done_since + poll_patience)
        return finished != 0;
      s.not_done_since = {};
      one_by_one = true; // earlier events may be done
      continue;
    }
    s.not_done_since = {};
    finished += finish_first(s, batch, p.event);
  }
  return finished != 0;
}

/// Finishes the first `count` parts of `s`, which are done, and all behind them that share `event`
/// with the last one. Returns how many it has finished. What they have waited for on this lane is
/// done, too: in a worker its event may tell that later, or never, if the worker is lost.
std::size_t lane::finish_first(lane_stream& s, std::size_t count, event_view event) noexcept {
  const auto now = nanoseconds(clock::now());
  std::size_t finished = 0;
  while (!s.in_flight.empty()) {
    auto& p = *s.in_flight.front();
    if (finished >= count && p.event.native != event.native)
      break;
    s.in_flight.pop_front();
    leave_flight(p);
    for (auto& x : p.predecessors)
      if (is_remote_ && x.at->on == this && !x.at->over())
        if (auto& other = streams_.stream_of(*x.at); other.is_ordered())
          finish_first(other, place_of(*x.at, other), x.at->event);
    if (is_remote_)
      keep_result(p, state_->ordinal());
    finish(p, now);
    ++finished;
  }
  return finished;
}

void lane::leave_flight(part& p) noexcept {
  in_flight_.fetch_sub(1, std::memory_order_relaxed);
  if (auto* who = streams_.tenant_of(p))
    --who->in_flight;
}

/// Marks a part as over. Returns its event.
event_view lane::set_over(part& p) noexcept {
  event_view event;
  {
    flag_lock lock{p.event_guard};
    std::swap(event, p.event);
    p.at.store(p.is_placeholder ? part::state::skipped : part::state::done,
               std::memory_order_release);
  }
  wake_waiting(p);
  p.predecessors.clear();
  return event;
}

void lane::finish(part& p, std::int64_t now) noexcept {
  const auto event = set_over(p);
  if (!p.shares_event)
    retire(event);
  if (!p.is_placeholder)
    p.of->on_part_done(p);
  record_.over(p, !p.is_placeholder, state_->generation(), now);
  settle_if_over(p);
}

void lane::end_lost(part& p) noexcept {
  static_cast<void>(set_over(p)); // its event is destroyed already
  settle_if_over(p);
}

void lost_process::end() noexcept {
  for (auto* p : parts)
    lane::end_lost(*p);
}

/// Called once for each part, as the last step.
void lane::settle_if_over(part& p) noexcept {
  p.of->on_part_over(p);
  if (!p.of->one_over())
    return;
  if (p.stream == stream_kind::collective)
    process_retired.add(p.of->settle()); // a collective holds no objects of the user any more
  else
    p.of->settle();
}

} // namespace troupe::detail
