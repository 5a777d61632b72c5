#include "admission/access_order.hpp"

#include "lane/lane.hpp" // for lane::state

#include <algorithm>
#include <unordered_set>
#include <utility>

namespace troupe::detail {

namespace {

void forget_what_is_over(access_list& x) {
  // Most operations are freed already: to check that takes no cache line from a lane.
  remove_if(x, [](const access& a) { return a.by.expired(); });
  if (x.crowded())
    remove_if(x, [](const access& a) { return is_over(a.by.lock(), *a.at); });
  x.looked_through();
}

void add_predecessor(part& p, predecessor x) {
  if (p.predecessors.empty() || p.predecessors.back().at != x.at ||
      p.predecessors.back().memory != x.memory)
    p.predecessors.push_back(std::move(x));
}

/// Returns whether a process that is lost may still do what `a` says, which is an access of `by`,
/// or what that had to follow. In a direct collective, each process writes to the memory of all
/// ranks.
bool is_of_lost_process(locked lock, const operation& by, const access& a) noexcept {
  return is_lost(lock, *a.at) || (a.writes && ((by.writes_to_peers() && by.has_lost_part(lock)) ||
                                               may_follow_lost_work(lock, by)));
}

/// Returns true if `u` supersedes the `i`th access, which is of `by`. If `u` supersedes only a part
/// of it, the rest may become another access.
bool order_use(locked lock, const std::shared_ptr<operation>& op, dependencies& around,
               const use& u, const std::shared_ptr<operation>& by, access_list& accesses,
               std::size_t i, bool held) {
  auto& p = op->parts()[u.part];
  auto& a = accesses[i];
  bool overlap = a.begin < u.end && u.begin < a.end;
  bool covered = u.begin <= a.begin && a.end <= u.end;
  const bool lost = is_of_lost_process(lock, *by, a);
  bool same_stream = by->on_lanes() && !lost && a.at->shares_stream(p);
  bool conflict = overlap && (a.writes || u.writes);
  if (conflict) {
    if (a.writes)
      by->precede(op, u.reads && !u.accepted.includes(by->request_number()));
    if (a.writes && u.writes) // `by` itself passes them on only when it settles
      for (auto& x : by->unreadable_behind(lock, *u.memory, *a.at, u.begin, u.end))
        op->overwrites(lock, u.memory, x);
    if ((lost || !by->on_lanes()) && (around.behind.empty() || around.behind.back() != by))
      around.behind.push_back(by);
  }
  // A part without a stream of the lane waits for nothing there, so it supersedes no access.
  bool takes_place =
      in_lane_stream(p.stream) && covered && (u.writes || (!a.writes && same_stream));
  // Memory of another device stays valid when a reset of the lane's device drops this part.
  auto outlives = [&] { return &u.memory->home() != &p.on->state(); };
  if ((conflict && !same_stream) || ((conflict || takes_place) && outlives()))
    add_predecessor(p, {by, a.at, u.memory.get()});
  // A later use follows this one, and so all work that precedes this one or is in its stream.
  if (!in_lane_stream(p.stream))
    return false;
  if (held && overlap && (takes_place || u.writes)) {
    auto taken = a;
    taken.begin = std::max(a.begin, u.begin);
    taken.end = std::min(a.end, u.end);
    around.superseded.push_back({u.memory.get(), std::move(taken)});
  }
  if (takes_place)
    return true;
  if (overlap && u.writes) { // `a` keeps only the rest
    if (a.begin < u.begin && u.end < a.end)
      accesses.add({a.by, a.at, u.end, a.end, a.writes, a.since});
    auto& rest = accesses[i];
    if (rest.begin < u.begin)
      rest.end = u.begin;
    else
      rest.begin = u.end;
  }
  return false;
}

} // namespace

void add_overwriters(locked lock, std::vector<std::shared_ptr<operation>>& users) {
  const std::unordered_set<std::shared_ptr<operation>> known{users.begin(), users.end()};
  std::unordered_set<std::shared_ptr<operation>> found;
  for (auto& origin : known) {
    if (!origin->writes_to_peers() || !origin->has_lost_part(lock))
      continue;
    std::vector<std::shared_ptr<operation>> open{origin};
    for (std::size_t i = 0; i < open.size(); ++i) // grows
      for (auto& x : open[i]->successors())
        if (x->shares_written_bytes(*origin) && std::ranges::find(open, x) == open.end()) {
          x->note_lost_before(lock);
          found.insert(x);
          open.push_back(x);
        }
  }
  for (auto& x : found)
    if (!known.contains(x))
      users.push_back(x);
}

void order_uses(locked lock, const std::shared_ptr<operation>& op, dependencies& around,
                std::span<const use> uses, bool held) {
  while (!uses.empty()) {
    auto run = first_run(uses);
    uses = uses.subspan(run.size());
    auto& accesses = run.front().memory->accesses;
    if (accesses.crowded())
      forget_what_is_over(accesses);
    order_run(lock, op, around, run, accesses, UINT64_MAX, held);
  }
}

void order_run(locked lock, const std::shared_ptr<operation>& op, dependencies& around,
               std::span<const use> run, access_list& accesses, std::uint64_t before, bool held) {
  auto next = [&](std::size_t i) { return accesses.next_in(i, run.front().begin, run.back().end); };
  for (auto i = next(0); i < accesses.size(); i = next(i)) {
    auto by = accesses[i].by.lock();
    bool others = by != op && accesses[i].since < before;
    // Reads of a lost process make no difference any more.
    bool gone = others && (is_over(by, *accesses[i].at) ||
                           (!accesses[i].writes && is_lost(lock, *accesses[i].at)));
    if (others && !gone) {
      auto u = std::lower_bound(run.begin(), run.end(), accesses[i].begin,
                                [](const use& x, std::size_t begin) { return x.end < begin; });
      for (; !gone && u != run.end() && u->begin <= accesses[i].end; ++u)
        gone = order_use(lock, op, around, *u, by, accesses, i, held);
    }
    if (gone)
      accesses.remove(i);
    else
      ++i;
  }
}

void note_use(locked lock, const std::shared_ptr<operation>& op, dependencies& around, const use& u,
              std::uint64_t since, bool held) {
  auto& p = op->parts()[u.part];
  u.memory->accesses.add({op, &p, u.begin, u.end, u.writes, since});
  if (u.writes) {
    ++u.memory->admitted_writes;
    u.memory->begin_write(); // first: the marks that it will overwrite are removed below
  }
  if (held)
    around.since.push_back(since);
  auto generation = &u.memory->home() == &p.on->state() && !u.memory->is_borrowed()
                        ? u.memory->generation()
                        : part::several_generations;
  p.generation =
      p.generation == 0 || p.generation == generation ? generation : part::several_generations;
  if (u.writes && (!u.reads || u.accepted.any()))
    for (auto& range : u.reads ? u.memory->mark_overwritten(u.begin, u.end, u.accepted)
                               : u.memory->mark_overwritten(u.begin, u.end))
      op->overwrites(lock, u.memory, range);
}

} // namespace troupe::detail
