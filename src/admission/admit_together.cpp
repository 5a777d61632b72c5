/// `admission`: operations that are admitted in one step, or not at all.
#include "admission/admission.hpp"
#include "admission/request_checks.hpp"
#include "lane/lane.hpp"
#include "lane/retired_operations.hpp"
#include "operation/admission_lock.hpp"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

namespace troupe::detail {

namespace {

using batch = std::span<const std::shared_ptr<operation>>;

/// Returns `uses` without the reads of ranges that operations of `earlier` overwrite.
std::vector<use> without_reads_of(batch earlier, std::span<const use> uses) {
  std::vector<use> result;
  for (auto& u : uses) {
    result.push_back({u.memory, u.begin, u.end, false, u.writes, u.part, u.accepted});
    if (!u.reads)
      continue;
    std::vector<unreadable_range> open{{u.begin, u.end, {}}};
    for (auto& x : earlier)
      for (auto& w : x->uses())
        if (w.memory == u.memory && w.writes) // what it reads itself was checked
          cut_out(open, w.begin, w.end);
    for (auto& x : open)
      result.push_back({u.memory, x.begin, x.end, true, false, u.part, u.accepted});
  }
  return result;
}

/// Checks all that does not depend on other operations than those of `earlier`.
caf::error check(locked lock, batch earlier, const operation& op, queue_bound bound) {
  if (auto error = check_lanes(lock, op, op.bounded(), bound); error)
    return error;
  if (auto error = op.on_check(lock); error)
    return error;
  const auto error = check_uses(lock, op, op, op.uses());
  return error ? check_uses(lock, op, op, without_reads_of(earlier, op.uses())) : error;
}

/// Calls `on_admit` of all, or of none. Only the first one that waits for its world is subject to
/// the bound of that queue: together they are one request.
caf::error let_in(locked lock, batch all, queue_bound bound, std::size_t& refused) {
  bool is_first = true;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const bool waits = all[i]->waits_for(lock) != nullptr;
    if (auto error = all[i]->on_admit(lock, waits && is_first ? bound : queue_bound::second)) {
      refused = i;
      for (auto& x : all.first(i))
        x->on_refuse(lock);
      return error;
    }
    is_first = is_first && !waits;
  }
  return {};
}

} // namespace

caf::error admission::admit_together(batch all, room_policy room, std::size_t& refused) {
  const auto how = choose_room(room);
  operations held;
  auto refusal = find_room(
      how, all.front()->deadline, [&] { return admit_together(all, how.bound, refused, held); },
      [&] { return who_makes_room(admission_lock{}, *all[refused], how.bound); });
  if (refusal)
    return refusal;
  for (auto& x : held)
    watch_held(x);
  for (auto& x : all)
    if (x->on_lanes())
      lane::wake_to_work(x->parts());
  process_retired.free_all(); // while the lanes work
  return {};
}

caf::error admission::admit_together(batch all, queue_bound bound, std::size_t& refused,
                                     operations& held) {
  const auto now = clock::now();
  refused = 0;
  caf::error refusal = check_deadline(*all.front(), now);
  if (refusal)
    return refusal;
  deferred_actions after;
  {
    admission_lock lock{admission_lock::spin_first{}};
    bring_up_to_date(lock, after);
    for (std::size_t i = 0; i < all.size() && !refusal; ++i) {
      refused = i;
      refusal = check(lock, all.first(i), *all[i], bound);
    }
    if (!refusal)
      refusal = let_in(lock, all, bound, refused);
    if (refusal)
      all = {};
    for (auto& x : all) {
      bool waits = false;
      commit(lock, x, now.time_since_epoch().count(), waits, after);
      if (waits)
        held.push_back(x);
    }
  }
  finish(after);
  return refusal;
}

} // namespace troupe::detail
