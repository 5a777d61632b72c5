#include "step/step_operation.hpp"

#include "collective/communicator.hpp"
#include "collective/rank_call.hpp"
#include "lane/lane.hpp"

#include <algorithm>
#include <string>
#include <utility>
#include <variant>

namespace troupe::detail {

namespace {

bool is_collective(const step_request& x) noexcept {
  return std::holds_alternative<collective>(x.what) || std::holds_alternative<group>(x.what);
}

/// A barrier: it uses no memory.
constexpr collective_kind stand_in = collective_kind::barrier;

} // namespace

caf::expected<std::shared_ptr<step_operation>>
step_operation::make(std::shared_ptr<const bound_step> what, step_place where) {
  std::vector<rank_call> calls;
  const collective none{.kind = stand_in};
  if (auto error = add_rank_calls(calls, "step", collective_view{none}, where.world->lanes());
      error)
    return error;
  return std::make_shared<step_operation>(std::move(what), std::move(where), std::move(calls));
}

step_operation::step_operation(std::shared_ptr<const bound_step> what, step_place where,
                               std::vector<rank_call> calls)
    : collective_operation("step", where.world, std::move(calls), what->uses),
      what_(std::move(what)), where_(std::move(where)), reached_(parts().size()) {}

caf::expected<issue_outcome> step_operation::issue(part& p, lane& on) {
  auto& mine = what_->graph_of(static_cast<std::size_t>(p.rank));
  const rank_graph::origin now{target(), on.state().generation(),
                               on.libraries().workspace_changes(), on.stream(p).native};
  if (mine.of == now && mine.graph.view().native != nullptr)
    return issued(*this, p, *target(), replay(p, on, mine));
  const bool was_run = mine.of == now;
  mine.of = now;
  mine.graph = {};
  mine.was_launched = false;
  if (was_run && !mine.runs_singly) {
    if (auto why = record(p, on, mine); !why)
      return issued(*this, p, *target(), replay(p, on, mine));
    else if (code_of(why) != errc::not_supported)
      return issued(*this, p, *target(), std::move(why));
    else
      what_->note_singly(why);
    mine.runs_singly = true;
  }
  auto why = enqueue(p, on, mode::runs);
  mine.of.workspaces = on.libraries().workspace_changes();
  return issued(*this, p, *target(), std::move(why));
}

/// A communicator knows the end of its own calls only. What is enqueued singly may be behind them.
caf::error step_operation::mark_end(part& p, event_view event, stream_view stream,
                                    backend_device& device) {
  return what_->graph_of(static_cast<std::size_t>(p.rank)).was_launched
             ? collective_operation::mark_end(p, event, stream, device)
             : device.record(event, stream);
}

bool step_operation::look(const part& p) const noexcept {
  auto& known = reached_[p.index];
  bool is_news = false;
  if (const auto on = target(); on && !p.over() && p.begun.load())
    static_cast<void>(on->call_from_outside(static_cast<std::size_t>(p.rank),
                                            [&](backend_communicator& rank) -> caf::error {
                                              const auto now = rank.reached();
                                              is_news = known.exchange(now) != now;
                                              return {};
                                            }));
  return is_news;
}

bool step_operation::on_stall() noexcept {
  if (over())
    return true;
  bool moves = false;
  for (auto& p : parts())
    moves |= look(p);
  if (moves || is_held_up())
    return false;
  auto why = stall_error(*this, target()->epoch());
  if (auto x = failure_of(why)) {
    x->detail +=
        "; of " + std::to_string(what_->requests.size()) + " requests of the step, they are past";
    for (auto& p : parts())
      x->detail += (p.index == 0 ? " " : ", ") + std::to_string(reached_[p.index].load());
    why = make_error(std::move(*x));
  }
  target()->fail(why);
  return true;
}

void step_operation::describe_to(flight_entry& x, const part& p) const noexcept {
  collective_operation::describe_to(x, p);
  look(p);
  x.progress.reached =
      static_cast<std::uint16_t>(std::min<std::uint32_t>(reached_[p.index].load(), UINT16_MAX));
}

/// Enqueues the requests of a rank one by one, all in the stream of the part.
caf::error step_operation::enqueue(part& p, lane& on, mode how) {
  auto made = what_->requests.make(where_, {}, {});
  if (!made)
    return std::move(made.error());
  for (std::size_t i = 0; i < made->all.size(); ++i) {
    const auto index = made->request_of[i];
    const auto& request = what_->requests[index];
    auto& op = *made->all[i];
    if (is_collective(request)) {
      static_cast<collective_operation&>(op).run_on(target());
      if (how == mode::records)
        target()
            ->rank(static_cast<std::size_t>(p.rank))
            .begin_recorded(static_cast<std::uint32_t>(index + 1));
    }
    if (auto why = enqueue_request(p, on, op))
      return in_step(index, request.verb, why);
  }
  return {};
}

caf::error step_operation::enqueue_request(part& p, lane& on, operation& op) {
  for (auto& x : op.parts()) {
    if (x.on != &on)
      continue;
    x.stream = p.stream;
    x.tenant = p.tenant;
    if (auto why = op.prepare(x, on))
      return why;
    if (auto outcome = op.issue(x, on); !outcome)
      return std::move(outcome.error());
  }
  return {};
}

caf::error step_operation::record(part& p, lane& on, rank_graph& to) {
  auto graph =
      on.device().record_graph(on.stream(p), [&] { return enqueue(p, on, mode::records); });
  if (!graph)
    return std::move(graph.error());
  to.graph = recorded_graph{on.shared_device(), *graph};
  return {};
}

caf::error step_operation::replay(part& p, lane& on, rank_graph& what) {
  what.was_launched = true;
  return target()->call(static_cast<std::size_t>(p.rank), on, [&](backend_communicator& rank) {
    return rank.replay(what.graph.view(), on.stream(p), on.device());
  });
}

} // namespace troupe::detail
