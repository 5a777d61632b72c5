#include "admission/held_operations.hpp"

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

namespace troupe::detail {

held_operation* held_operations::find(const operation& op) noexcept {
  auto i =
      std::lower_bound(all_.begin(), all_.end(), op.position(),
                       [](auto& x, std::uint64_t position) { return x.op->position() < position; });
  return i == all_.end() || i->op.get() != &op ? nullptr : &*i;
}

void held_operations::erase(const held_operation& x) {
  inversions_ -= x.follows_younger;
  all_.erase(std::find_if(all_.begin(), all_.end(), [&](auto& y) { return &y == &x; }));
}

void held_operations::note_inversion(held_operation& x) noexcept {
  if (x.follows_younger || std::none_of(x.behind.begin(), x.behind.end(), [&](auto& other) {
        return other->position() > x.op->position();
      }))
    return;
  x.follows_younger = true;
  ++inversions_;
}

/// Returns whether `op` waits for `first`.
bool held_operations::is_behind(const operation& op, const operation& first) {
  std::vector<const operation*> open{&op};
  for (std::size_t i = 0; i < open.size(); ++i) {
    if (open[i] == &first)
      return true;
    if (auto* held = find(*open[i]))
      for (auto& x : held->behind)
        if (std::find(open.begin(), open.end(), x.get()) == open.end())
          open.push_back(x.get());
  }
  return false;
}

bool held_operations::would_wait_for_itself(locked, const operation& op,
                                            std::span<const use> uses) {
  if (all_.size() < 2)
    return false;
  for (auto& u : uses) {
    auto& accesses = u.memory->accesses;
    for (auto i = accesses.next_in(0, u.begin, u.end); i < accesses.size();
         i = accesses.next_in(i + 1, u.begin, u.end))
      if (auto& a = accesses[i]; a.writes || u.writes)
        if (auto by = a.by.lock(); by && by.get() != &op && !by->on_lanes() &&
                                   (inversions_ != 0 || by->position() > op.position()) &&
                                   is_behind(*by, op))
          return true;
  }
  return false;
}

void held_operations::forget_withdrawn_predecessors(locked) {
  for (auto& x : all_)
    if (std::erase_if(x.behind, [](auto& y) { return y->is_removed(); }) != 0)
      for (auto& p : x.op->parts())
        std::erase_if(p.predecessors, [](const predecessor& y) { return y.of->is_removed(); });
}

void held_operations::restore_superseded(locked lock, std::span<const held_operation> gone) {
  std::map<buffer*, access_list> restored; // for each buffer that `gone` used
  for (auto& x : gone) {
    for (auto& u : x.op->uses())
      restored[u.memory.get()];
    for (auto& y : x.superseded)
      if (auto by = y.what.by.lock(); !is_over(by, *y.what.at) && !by->is_removed())
        restored[y.memory].add(y.what);
  }
  for (auto& [memory, accesses] : restored)
    remove_if(memory->accesses, [](const access& a) {
      auto by = a.by.lock();
      return by && by->is_removed();
    });
  std::erase_if(restored, [](auto& x) { return x.second.size() == 0; });
  if (restored.empty())
    return;
  struct later_use {
    std::uint64_t since;
    held_operation* of;
    const use* what;
  };
  std::vector<later_use> later;
  for (auto& x : all_)
    for (auto since = x.since.begin(); auto& u : x.op->uses()) {
      if (restored.contains(u.memory.get()))
        later.push_back({*since, &x, &u});
      ++since;
    }
  std::ranges::sort(later, {}, &later_use::since);
  for (auto& x : later)
    order_run(lock, x.of->op, *x.of, {x.what, 1}, restored[x.what->memory.get()], x.since, true);
  for (auto& x : all_)
    note_inversion(x);
  for (auto& [memory, accesses] : restored)
    for (std::size_t i = 0; i < accesses.size(); ++i)
      memory->accesses.add(accesses[i]);
}

} // namespace troupe::detail
