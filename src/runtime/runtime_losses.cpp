/// Part of class `runtime`: losses of devices in other processes, and the end of their work.

#include "foundation/log.hpp"
#include "operation/admission_lock.hpp"
#include "runtime/runtime.hpp"

#include <algorithm>
#include <ranges>
#include <utility>

namespace troupe::detail {

namespace {

/// How often to look whether the work of a lost process is over.
constexpr std::chrono::milliseconds lost_work_tick{1};

} // namespace

struct runtime::noted_loss {
  caf::error why;
  std::uint64_t until; ///< position of the last operation that is lost with the device
  bool is_news;        ///< no earlier report has told that
};

/// Closes a lost device, and begins its loss (`retry_order`). None: it is not ready yet, has ended,
/// or is in another process by now.
std::optional<runtime::noted_loss> runtime::note_lost(lane& where) {
  auto& state = where.state();
  admission_lock lock;
  const auto phase = state.phase();
  if (phase != device_phase::ready && phase != device_phase::resetting)
    return std::nullopt;
  const auto why = where.loss(lock);
  if (!why)
    return std::nullopt;
  const auto last = where.go_away(lock, operation::last_position(lock));
  admission_->retries(lock).begin_loss(lock);
  const bool is_news = last > state.lost_until(lock);
  state.set_lost_until(lock, last);
  if (phase == device_phase::ready) { // else lost again, or lost while it was reset
    if (where.may_keep_memory(lock, why))
      state.lose_process(why);
    else
      state.close(device_phase::resetting, why);
  }
  return noted_loss{why, last, is_news};
}

void runtime::on_device_lost(lane& where) noexcept {
  auto& state = where.state();
  admission_->drain(); // earlier calls fail with the others
  const bool was_ready = state.phase() == device_phase::ready;
  const auto noted = note_lost(where);
  if (!noted)
    return;
  const auto& why = noted->why;
  if (was_ready)
    log(log_level::warning, "device " + std::to_string(state.ordinal()) + " is lost", why);
  auto users = users_of(state.ordinal(), false);
  {
    admission_lock lock;
    retry_order::leave_out_waiting(lock, users, noted->until);
    if (noted->is_news) // later ones wait for the end of the lost work
      add_overwriters(lock, users);
  }
  note_end(why);
  tell_watchers(state.ordinal(), why); // before the operations fail: the lane drops failed ones
  note_closed(why);
  // The last one first: their lane may find meanwhile that work was done. Then a request that may
  // be made again does not fail before a later one that succeeds, which would prevent that.
  for (auto& x : users | std::views::reverse)
    x->fail(why);
  {
    std::lock_guard lock{slots_mutex_};
    slots_[static_cast<std::size_t>(state.ordinal())].reset_wanted = false;
  }
  moves_.end(state.ordinal(), why);
  where.request_revival();
  end_loss();
  admission_->go_on_soon(); // held requests may need ranks that are gone
}

void runtime::on_device_back(lane& where) noexcept {
  tell_watchers(where.state().ordinal(), {}); // first: requests go on at once where a world does
  admission_->go_on();                        // held requests wait for it
}

void runtime::on_memory_lost(lane& where, const caf::error& why) noexcept {
  note_closed(why);
  fail_users_of(where.state().ordinal(), why, true);
}

/// Notes the loss for operations that have work in the process, if `on_device_lost` has not: the
/// device was to end, or the report comes late. What overwrites their results fails with them.
void runtime::note_lost_work(device_state& state, lost_process& x, const caf::error& why) {
  std::vector<std::shared_ptr<operation>> users;
  {
    admission_lock lock;
    for (auto* p : x.parts)
      if (p->of->position() > x.until)
        users.push_back(std::static_pointer_cast<operation>(p->of->shared_from_this()));
    if (users.empty())
      return;
    for (auto& op : users)
      x.until = std::max(x.until, op->position());
    state.set_lost_until(lock, x.until);
    add_overwriters(lock, users);
  }
  std::ranges::sort(users, std::ranges::greater{}, [](auto& op) { return op->position(); });
  for (auto& op : users) // in the order of `on_device_lost`
    op->fail(why);
}

void runtime::on_lost_process(lane& where, lost_process x, const caf::error& why) noexcept {
  const auto ordinal = where.state().ordinal();
  note_lost_work(where.state(), x, why);
  {
    std::lock_guard lock{slots_mutex_};
    auto& s = slots_[static_cast<std::size_t>(ordinal)];
    s.lost.push_back(std::move(x));
    if (std::exchange(s.watches_lost, true))
      return; // processes are ended by one thread at a time, in their order
  }
  watch_lost(ordinal);
}

void runtime::on_moved(lane& where, const caf::error& why) noexcept {
  const auto ordinal = where.state().ordinal();
  if (!why) { // claims end with the former process
    note_closed(make_error({.code = errc::worker_lost,
                            .detail = "the device was handed over to its spare",
                            .device = ordinal}));
    for (auto* listener : listeners_)
      listener->on_lost_work_over(ordinal);
  }
  moves_.on_moved(ordinal, why);
}

/// Ends lost processes whose work is over, one after the other, and looks again later if there are
/// more.
void runtime::watch_lost(int ordinal) {
  auto& s = slots_[static_cast<std::size_t>(ordinal)];
  while (end_lost(s)) {
  }
  {
    std::lock_guard lock{slots_mutex_};
    if (s.lost.empty()) {
      s.watches_lost = false;
      return;
    }
  }
  const auto again =
      deadlines_.call_at(clock::now() + lost_work_tick, [weak = weak_from_this(), ordinal] {
        if (auto self = weak.lock())
          self->watch_lost(ordinal);
      });
  static_cast<void>(again); // 0: the runtime closes, and ends them
}

/// Returns whether a part of the same operation, on another device, may still write to memory of
/// the device that had `p`. A part of another lost process writes until the work of that is over.
bool runtime::is_written_by_peers(const part& p) const {
  const auto has_stopped = [this](const part& x) {
    const auto& lost = slots_[static_cast<std::size_t>(x.on->state().ordinal())].lost;
    const auto process =
        std::ranges::find_if(lost, [&](auto& y) { return x.of->position() <= y.until; });
    return process != lost.end() && process->work_is_over();
  };
  return p.of->writes_to_peers() &&
         std::ranges::any_of(p.of->parts(), [&](auto& x) { return !x.over() && !has_stopped(x); });
}

/// Ends the parts of the first lost process, if its work is over, except where peers still write.
/// Returns whether that was the rest of it.
bool runtime::end_lost(slot& s) {
  lost_process over;
  bool is_rest = false;
  {
    std::lock_guard lock{slots_mutex_};
    if (s.lost.empty() || !(closed_ || s.lost.front().work_is_over()))
      return false;
    auto& first = s.lost.front();
    const auto rest = std::ranges::partition(
        first.parts, [this](const part* p) { return closed_ || !is_written_by_peers(*p); });
    is_rest = rest.empty();
    if (is_rest) {
      over = std::move(first); // what it keeps is not destroyed under the mutex
      s.lost.pop_front();
    } else {
      over.parts.assign(first.parts.begin(), rest.begin());
      first.parts.erase(first.parts.begin(), rest.begin());
      if (over.parts.empty())
        return false;
    }
  }
  over.end();
  auto& state = s.worker->state();
  bool was_last = false;
  if (is_rest) {
    admission_lock lock;
    state.set_lost_work_over(lock, over.until);
    was_last = !state.has_lost_work(lock);
  }
  admission_->go_on(); // held requests may wait for it
  s.worker->wake();    // and a reset
  if (was_last)
    for (auto* listener : listeners_)
      listener->on_lost_work_over(state.ordinal());
  return is_rest;
}

void runtime::tell_watchers(int ordinal, const caf::error& why) {
  std::vector<std::pair<std::shared_ptr<void>, std::function<void(int, const caf::error&)>>> all;
  {
    std::lock_guard lock{losses_mutex_};
    std::erase_if(losses_, [](auto& x) { return x.first.expired(); });
    for (auto& [who, f] : losses_)
      if (auto alive = who.lock())
        all.emplace_back(std::move(alive), f);
  }
  for (auto& [who, f] : all)
    f(ordinal, why);
}

void runtime::watch_losses(std::weak_ptr<void> who, std::function<void(int, const caf::error&)> f) {
  std::lock_guard lock{losses_mutex_};
  std::erase_if(losses_, [](auto& x) { return x.first.expired(); });
  losses_.emplace_back(std::move(who), std::move(f));
}

} // namespace troupe::detail
