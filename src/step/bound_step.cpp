#include "step/bound_step.hpp"

#include "foundation/log.hpp"
#include "lane/lane.hpp" // for device
#include "operation/device_state.hpp"
#include "operation/launch_registry.hpp"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <variant>

namespace troupe::detail {

namespace {

/// How a rank uses its memory: in what order, and whether it reads what the step has not written.
class rank_uses {
public:
  /// Adds those of one request. It reads before it writes.
  void add(std::span<const use> all, std::uint32_t part) {
    for (auto& u : all)
      if (u.part == part && u.reads)
        each_piece(u, [](piece& x) { x.reads |= !x.writes; });
    for (auto& u : all)
      if (u.part == part && u.writes)
        each_piece(u, [](piece& x) { x.writes = true; });
  }

  void move_to(std::vector<use>& to, std::size_t rank) {
    for (auto& [memory, pieces] : pieces_)
      for (auto& [begin, x] : pieces)
        to.push_back({x.memory, begin, x.end, x.reads, x.writes, static_cast<std::uint32_t>(rank)});
    for (auto& x : empty_)
      to.push_back({x, 0, 0, true, false, static_cast<std::uint32_t>(rank)});
  }

private:
  struct piece {
    std::shared_ptr<buffer> memory;
    std::size_t end = 0;
    bool reads = false;
    bool writes = false;
  };
  using piece_list = std::map<std::size_t, piece>; // by their first byte; they do not overlap

  /// Calls `f` for pieces that are all of `u`.
  template <class F> void each_piece(const use& u, F f) {
    if (u.begin == u.end) {
      empty_.insert(u.memory);
      return;
    }
    auto& all = pieces_[u.memory.get()];
    split(all, u.begin);
    split(all, u.end);
    auto at = u.begin;
    for (auto i = all.lower_bound(u.begin); at != u.end; at = i->second.end, ++i) {
      const auto end = i == all.end() ? u.end : std::min(i->first, u.end);
      if (at != end)
        i = all.emplace(at, piece{u.memory, end}).first;
      f(i->second);
    }
  }

  /// Makes a piece begin at `at`, if one has that byte.
  static void split(piece_list& all, std::size_t at) {
    auto next = all.upper_bound(at);
    if (next == all.begin())
      return;
    auto& [begin, x] = *std::prev(next);
    if (begin == at || x.end <= at)
      return;
    auto rest = x;
    x.end = at;
    all.emplace_hint(next, at, std::move(rest));
  }

  std::map<const buffer*, piece_list> pieces_;
  std::set<std::shared_ptr<buffer>> empty_; ///< memory with ranges of no bytes
};

/// With more requests for a rank, its first run could fill the launch queue of the device.
constexpr std::size_t most_requests = 256;

/// Returns the name of the first launch that cannot be recorded; null: there is none.
const std::string* find_called(const step_requests& requests) {
  for (std::size_t i = 0; i < requests.size(); ++i)
    if (auto* launch = std::get_if<step_launch>(&requests[i].what);
        launch != nullptr && !replays(launch->name))
      return &launch->name;
  return nullptr;
}

/// Returns why these requests, which `made` would run, are no graphs. Empty if they are.
std::string why_no_graph(const step_requests& requests, const step_operations& made,
                         const step_place& where) {
  auto& world = *where.world;
  if (!std::ranges::all_of(world.lanes(), [](auto& x) { return x->device().records_graphs(); }))
    return world.owner()->backend().name() == "host" ? "the devices are virtual"
                                                     : "the devices record no graphs";
  if (made.all.empty())
    return "there are none";
  if (requests.size() > most_requests)
    return "there are more than " + std::to_string(most_requests);
  if (const auto* name = find_called(requests))
    return "the launch \"" + *name + "\" is not registered with repetition::replays";
  for (std::size_t i = 0; i < made.all.size(); ++i)
    if (made.all[i]->parts()[0].stream == stream_kind::collective &&
        !made.all[i]->writes_to_peers())
      return "request " + std::to_string(made.request_of[i] + 1) + " (" + made.all[i]->verb() +
             ") goes by NCCL";
  return {};
}

std::vector<use> uses_of(const step_operations& made, const step_place& where) {
  const auto lanes = where.world->lanes();
  std::vector<use> result;
  for (std::size_t rank = 0; rank < lanes.size(); ++rank) {
    rank_uses all;
    for (auto& op : made.all)
      for (auto& p : op->parts())
        if (p.on == lanes[rank].get())
          all.add(op->uses_of(p), static_cast<std::uint32_t>(p.index));
    all.move_to(result, rank);
  }
  return result;
}

} // namespace

recorded_graph::recorded_graph(lane& on, graph_view graph, operation_batch keeps)
    : home_(on.shared_state()), on_(on.shared_device()), graph_(graph), keeps_(std::move(keeps)) {}

recorded_graph::~recorded_graph() {
  if (graph_.native == nullptr)
    return;
  auto drop = [on = on_](void* native) {
    const auto device = on.lock();
    if (const auto error = device ? device->drop_graph({native}) : caf::error{})
      log(log_level::warning, "a graph was not dropped", error);
  };
  home_->release({graph_.native, 0, std::move(drop)});
}

bool bound_step::is_graph() const {
  const std::lock_guard lock{mutex_};
  return why_no_graph_.empty();
}

std::string bound_step::runs_as() const {
  const std::lock_guard lock{mutex_};
  return why_no_graph_.empty() ? "as a graph on each device" : "as its requests: " + why_no_graph_;
}

void bound_step::give_up_graph(const caf::error& why) const {
  const std::lock_guard lock{mutex_};
  if (why_no_graph_.empty())
    why_no_graph_ = describe(why);
}

/// A request that can be made is right by itself: makes the operations once, and drops them.
caf::expected<std::shared_ptr<const bound_step>> bind_step(step_requests requests,
                                                           const step_place& where) {
  const request_options checked{.allow_shrunk = true};
  const auto absent = where.world->absent();
  auto made = requests.make(where, absent, checked);
  if (!made)
    return std::move(made.error());
  auto why = absent.empty() ? why_no_graph(requests, *made, where)
                            : "ranks were absent when it was recorded";
  auto uses = why.empty() ? uses_of(*made, where) : std::vector<use>{};
  const auto ranks = where.world->size();
  return std::make_shared<const bound_step>(std::move(requests), ranks, std::move(why),
                                            std::move(uses));
}

} // namespace troupe::detail
