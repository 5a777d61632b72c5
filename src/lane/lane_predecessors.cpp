/// Part of class `lane`: tells whether the work before a part is over, waits for its predecessors,
/// and replaces dropped ones by their own predecessors.
#include "foundation/error_text.hpp"
#include "foundation/spin.hpp"
#include "lane/lane.hpp"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace troupe::detail {

namespace {

/// Returns whether `x` and all work before it are over.
bool passed(const part& x) noexcept { return x.over() && !x.dropped(); }

/// Returns the predecessors that replace `x`, if `x` is dropped.
std::vector<predecessor> behind_dropped(const predecessor& x) {
  std::vector<predecessor> result;
  flag_lock lock{x.at->event_guard};
  if (x.at->dropped())
    for (auto& y : x.at->predecessors)
      if (y.memory == x.memory && !passed(*y.at))
        result.push_back(y);
  return result;
}

} // namespace

/// Returns the operation that `p` must wait for; 0: the next generation. None: `p` may be issued.
std::optional<std::uint64_t> lane::held_by(part& p) noexcept {
  if (state_->phase() == device_phase::resetting)
    return 0;
  if (in_lane_stream(p.stream))
    if (auto* first = streams_.stream_of(p).continuing)
      return first->of->number();
  for (bool again = true; again;) {
    again = false;
    for (auto& x : p.predecessors) {
      if (must_await(*x.at))
        return x.of->number();
      again |= x.at->dropped();
    }
    if (again)
      see_through_dropped(p);
  }
  // CUDA may put a stream that was made late into one queue with another stream. Work that a
  // continuing part still has to enqueue there must not come behind a part that waits for others.
  // (A claim may wait long: it holds up no transfer, and no transfer holds it up.)
  const bool lends = p.stream == stream_kind::lend;
  if ((p.stream == stream_kind::peer || lends) && !nothing_before(p))
    for (auto* s : streams_.made())
      if (s->continuing != nullptr && (!lends || s->continuing->tenant != nullptr))
        return s->continuing->of->number();
  return std::nullopt;
}

/// Replaces dropped predecessors of `p` by their own predecessors. There may be long chains of
/// them, and many paths from one to another.
void lane::see_through_dropped(part& p) {
  std::set<std::pair<const part*, const buffer*>> seen;
  std::vector<predecessor> result;
  std::vector<predecessor> dropped;
  auto sort_in = [&](std::vector<predecessor> all) {
    for (auto& x : all)
      if (seen.emplace(x.at, x.memory).second)
        (x.at->dropped() ? dropped : result).push_back(std::move(x));
  };
  sort_in(std::move(p.predecessors));
  while (!dropped.empty()) {
    auto x = std::move(dropped.back());
    dropped.pop_back();
    sort_in(behind_dropped(x));
  }
  p.predecessors = std::move(result);
}

bool lane::must_await(const part& x) noexcept {
  auto pending = [&] { return !x.recorded.load() && !x.over(); };
  if (!pending())
    return false;
  if (x.on == this)
    return true;
  flag_lock lock{x.event_guard};
  if (std::find(x.waiting.begin(), x.waiting.end(), this) == x.waiting.end())
    x.waiting.push_back(this);
  x.awaited.store(true); // before the second check: the other lane does both in the opposite order
  return pending();
}

void lane::wake_waiting(const part& x) noexcept {
  if (!x.awaited.load())
    return;
  std::vector<lane*> all;
  {
    flag_lock lock{x.event_guard};
    all.swap(x.waiting);
  }
  for (auto* other : all)
    other->wake();
}

void lane::set_recorded(part& p) noexcept {
  p.recorded.store(true);
  wake_waiting(p);
}

void lane::set_skipped(part& p) noexcept {
  auto& all = p.predecessors;
  std::erase_if(all, [&](auto& x) { return &x.memory->home() == &p.on->state(); });
  if (!all.empty()) {
    see_through_dropped(p);
    std::erase_if(all, [](auto& x) { return passed(*x.at); });
    auto self = std::static_pointer_cast<operation>(p.of->shared_from_this());
    for (auto& x : all) // until they are settled, later operations are ordered behind this one
      x.of->precede(self, false);
  }
  {
    flag_lock lock{p.event_guard};
    p.at.store(all.empty() ? part::state::skipped : part::state::dropped,
               std::memory_order_release);
  }
  wake_waiting(p);
}

/// Returns whether later work relies on `p` to come after work that is not over yet.
bool lane::stands_between(const part& p) const noexcept {
  if (!p.uses_memory || p.of->is_removed() || !in_lane_stream(p.stream) ||
      state_->live_incarnation() == 0)
    return false;
  auto& s = streams_.stream_of(p);
  return s.continuing != nullptr || !s.in_flight.empty() || !nothing_before(p);
}

/// Returns whether all predecessors of `p` are over or in its stream, and its former communicator
/// has no work in flight.
bool lane::nothing_before(const part& p) noexcept {
  return std::all_of(p.predecessors.begin(), p.predecessors.end(),
                     [&](const predecessor& x) {
                       return !x.at->dropped() && (x.at->over() || x.at->shares_stream(p));
                     }) &&
         (p.after == nullptr || p.after->in_flight == 0);
}

bool lane::collectives_over() const noexcept {
  auto all = streams_.collective_range();
  return std::all_of(all.begin(), all.end(), [](const auto& s) {
    return std::all_of(s.in_flight.begin(), s.in_flight.end(),
                       [](const part* p) { return p->of->failed(); });
  });
}

/// Makes the stream of `p`, if it is one of the lane, wait for what must come before `p`.
caf::error lane::wait_for_what_is_before(part& p) {
  if (!in_lane_stream(p.stream))
    return {};
  auto to = stream(p);
  auto result = wait_for_predecessors(p, to);
  if (p.after == nullptr || p.after->in_flight == 0)
    return result;
  for (auto* x : streams_.stream_of(*p.after).in_flight)
    if (x->tenant == p.after && x->event.native != nullptr)
      keep_first(result, device_->wait(to, x->event));
  return result;
}

/// Returns whether `x`, which is issued, is before `p` in a stream for launches that overlap.
bool lane::is_before_in_stream(const part& x, const part& p) const noexcept {
  const bool overlaps = p.stream == stream_kind::overlap || x.stream == stream_kind::overlap;
  return overlaps && x.on == this && in_lane_stream(x.stream) && in_lane_stream(p.stream) &&
         streams_.index_of(x) == streams_.index_of(p);
}

caf::error lane::wait_for_predecessors(part& p, stream_view stream) {
  caf::error result;
  for (auto& x : p.predecessors)
    if (!x.at->over() && !x.at->shares_stream(p) && !is_before_in_stream(*x.at, p))
      keep_first(result, wait_for(*x.at, stream));
  return result;
}

caf::error lane::wait_for(const part& x, stream_view stream) {
  if (x.on == this) // only this lane changes its event
    return x.event.native != nullptr ? device_->wait(stream, x.event) : caf::error{};
  event_word word;
  {
    flag_lock lock{x.event_guard};
    if (x.event.native == nullptr)
      return {};
    if (is_remote_)
      word = x.on->device().word_of(x.event);
    if (!word.word)
      return device_->wait(stream, x.event);
  }
  // Without the lock: this is a request to another process.
  return device_->wait_word(stream, word.word.get(), word.value);
}

} // namespace troupe::detail
