/// Part of class `lane`: issues small copies that follow one another over a link in one call, and
/// records one event behind them.

#include "lane/lane.hpp"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>

namespace troupe::detail {

namespace {

/// Returns whether two copies must keep their order.
bool touch(const peer_copy& a, const peer_copy& b) noexcept {
  auto overlap = [](const void* x, std::size_t x_bytes, const void* y, std::size_t y_bytes) {
    auto begin = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p); };
    return begin(x) < begin(y) + y_bytes && begin(y) < begin(x) + x_bytes;
  };
  return overlap(a.target, a.size_bytes, b.target, b.size_bytes) ||
         overlap(a.target, a.size_bytes, b.source, b.size_bytes) ||
         overlap(a.source, a.size_bytes, b.target, b.size_bytes);
}

} // namespace

void lane::note_copy(lane_stream& s, const part& p) noexcept {
  if (s.in_flight.empty()) {
    s.largest_bytes = 0;
    s.waits = false;
  }
  s.largest_bytes = std::max(s.largest_bytes, p.of->size_bytes());
  s.waits |= !nothing_before(p);
}

/// Returns whether the next part continues the run of `p`, as far as is known now.
bool lane::run_goes_on_after(const part& p) const noexcept {
  return p.is_small_copy && !p.is_placeholder && !waiting_.empty() &&
         waiting_.front()->is_small_copy && waiting_.front()->peer == p.peer &&
         device_->prefers_copy_peers();
}

/// Returns whether `p` can join the run. If it waited for other work, the whole run would wait too.
bool lane::joins_run(const part& p) const noexcept {
  return p.is_small_copy && &streams_.stream_of(p) == run_.in && nothing_before(p);
}

caf::error lane::copy_over_link(part& p, const peer_copy& x) {
  if (run_.goes_apart || (run_.in == nullptr && !run_goes_on_after(p)))
    return device_->copy_peer(x.target, x.target_device, x.source, x.source_device, x.size_bytes,
                              stream(p));
  // Copies in one call run in any order.
  if (std::any_of(run_.copies.begin(), run_.copies.end(),
                  [&](const peer_copy& other) { return touch(x, other); }))
    issue_run(stream(p));
  run_.copies.push_back(x);
  run_.owners.push_back(&p);
  return {};
}

void lane::end_run() {
  if (run_.in == nullptr)
    return;
  issue_run(run_.in->stream);
  mark_last(*std::exchange(run_.in, nullptr), std::exchange(run_.parts, 0));
}

void lane::issue_run(stream_view stream) {
  if (run_.copies.size() < 2 || note(device_->copy_peers(run_.copies, stream)))
    issue_apart();
  run_.copies.clear();
  run_.owners.clear();
}

/// Issues the copies of a run one by one: to find the wrong one, and to stop at a failed link.
void lane::issue_apart() {
  run_.goes_apart = true;
  for (auto* p : run_.owners) {
    auto outcome = p->of->issue(*p, *this);
    if (outcome)
      continue;
    operation::take_back_issue(*p);
    p->of->part_lost(*p, in_full(*p, note(outcome.error())));
  }
  run_.goes_apart = false;
}

/// Records one event behind the last `parts` parts in flight in `s`, which share it.
void lane::mark_last(lane_stream& s, std::size_t parts) {
  auto last = std::prev(s.in_flight.end());
  auto first = std::prev(s.in_flight.end(), static_cast<std::ptrdiff_t>(parts));
  for (auto i = first; i <= last; ++i)
    if (!(*i)->is_placeholder) {
      (*i)->at.store(part::state::issued, std::memory_order_release);
      record_.issued(**i);
    }
  if ((*last)->event.native == nullptr) {
    auto event =
        mark([&](event_view x) { return (*last)->of->mark_end(**last, x, s.stream, *device_); });
    if (!event) {
      if (owner_tells(event.error()))
        return;
      // Without an event it is unknown when the work is over: only the end of the process is left.
      auto why = note_fault(event.error());
      for (auto i = first; i <= last; ++i)
        (*i)->of->fail(why);
      return;
    }
    (*last)->event = *event;
  }
  for (auto i = first; i <= last; ++i) {
    if (i != last) {
      (*i)->event = (*last)->event;
      (*i)->shares_event = true;
    }
    set_recorded(**i);
  }
  if (!s.is_ordered())
    return; // no lane waits for users' streams
  if (options_.completion == completion_strategy::host_func && !device_->signals_completion())
    static_cast<void>(note(device_->launch_host(
        s.stream, [](void* self) { static_cast<lane*>(self)->wake(); }, this)));
  else if (options_.completion == completion_strategy::synchronize)
    static_cast<void>(note(device_->synchronize((*last)->event)));
  note_started(s);
}

} // namespace troupe::detail
