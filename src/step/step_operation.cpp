#include "step/step_operation.hpp"

#include "collective/communicator.hpp"
#include "collective/rank_call.hpp"
#include "foundation/log.hpp"
#include "lane/lane.hpp"

#include <algorithm>
#include <string>
#include <utility>
#include <variant>

namespace troupe::detail {

namespace {

/// The collective as which a step has its place among those of its world. It is never made.
constexpr collective_kind stand_in = collective_kind::barrier;
/// A step runs as its requests once a rank has failed so often to record it.
constexpr int most_failures = 2;

} // namespace

caf::expected<std::shared_ptr<step_operation>>
step_operation::make(std::shared_ptr<const bound_step> what, step_place where,
                     std::uint64_t membership) {
  std::vector<rank_call> calls;
  const collective none{.kind = stand_in};
  if (auto error = add_rank_calls(calls, "step", collective_view{none}, where.world->lanes());
      error)
    return error;
  return std::make_shared<step_operation>(std::move(what), std::move(where), std::move(calls),
                                          membership);
}

step_operation::step_operation(std::shared_ptr<const bound_step> what, step_place where,
                               std::vector<rank_call> calls, std::uint64_t membership)
    : collective_operation("step", where.world, std::move(calls), membership, what->uses),
      what_(std::move(what)), where_(std::move(where)),
      progress_(std::make_shared<std::vector<progress>>(parts().size())),
      reached_before_(parts().size()) {}

/// Takes a new word: what was enqueued before may still write to the old one.
void step_operation::take_word(lane& on, rank_graph& to) {
  auto word = on.take_word();
  if (!word) // it runs all the same
    log(log_level::warning, "no pinned memory for a step: its progress is not known", word.error());
  to.reached = word ? std::move(*word) : nullptr;
}

caf::expected<issue_outcome> step_operation::issue(part& p, lane& on) {
  auto& mine = what_->graph_of(static_cast<std::size_t>(p.rank));
  const rank_graph::origin now{target(), on.state().generation(), on.workspace_changes(),
                               on.stream(p).native};
  const bool was_run = mine.of == now;
  const bool is_there = was_run && mine.graph.view().native != nullptr;
  if (!is_there)
    take_word(on, mine);
  auto& [owner, word] = (*progress_)[p.index];
  owner = mine.reached;
  word.store(reinterpret_cast<std::uint32_t*>(owner.get()));
  if (is_there)
    return issued(*this, p, *target(), replay(p, on, mine));
  mine.of = now;
  mine.graph = {};
  mine.ends_with_graph = false;
  if (was_run && mine.failures < most_failures) {
    auto why = record(p, on, mine);
    if (!why)
      return issued(*this, p, *target(), replay(p, on, mine));
    if (is_of_loss(why))
      return issued(*this, p, *target(), std::move(why));
    // Nothing was enqueued. It may have failed because of what another thread called.
    mine.failures = code_of(why) == errc::not_supported ? most_failures : mine.failures + 1;
    if (mine.failures == most_failures)
      what_->give_up_graph(why);
  }
  return run_singly(p, on, mine);
}

/// Returns whether the error has a cause that others tell to all operations.
bool step_operation::is_of_loss(const caf::error& why) const noexcept {
  const auto code = code_of(why);
  return code == errc::device_fault || code == errc::worker_lost || !target()->live();
}

caf::expected<issue_outcome> step_operation::run_singly(part& p, lane& on, rank_graph& mine) {
  enqueued all;
  auto why = enqueue(p, on, all);
  mine.of.workspaces = on.workspace_changes();
  if (!why)
    return issue_outcome::enqueued;
  mine.of = {}; // not all of it has run
  if (is_of_loss(why))
    return issued(*this, p, *target(), std::move(why));
  fail(why);               // at once, so that this is the cause for all ranks
  if (all.has_collectives) // which would meet others of the ranks that do not make these
    target()->fail_unless_lost(loss_error(*this, p, target()->epoch(), why));
  return why;
}

/// A communicator knows the end of its own calls only. What is enqueued one by one may be behind
/// them.
caf::error step_operation::mark_end(part& p, event_view event, stream_view stream,
                                    backend_device& device) {
  return what_->graph_of(static_cast<std::size_t>(p.rank)).ends_with_graph
             ? collective_operation::mark_end(p, event, stream, device)
             : device.record(event, stream);
}

/// Returns the last request that is known to be over; 0: none. The next run has the word as soon as
/// this one is over.
std::uint32_t step_operation::reached(const part& p) const noexcept {
  if (p.over() && !failed())
    return static_cast<std::uint32_t>(what_->requests.size());
  auto* const word = (*progress_)[p.index].word.load();
  return word != nullptr ? std::atomic_ref{*word}.load() : 0;
}

/// The ranks of a step without collectives do not wait for each other.
void step_operation::on_lost_part(part& p, const caf::error& why) noexcept {
  if (what_->requests.have_collectives())
    collective_operation::on_lost_part(p, why);
}

bool step_operation::on_stall() noexcept {
  if (over())
    return true;
  bool moves = false;
  for (auto& p : parts()) {
    const auto now = reached(p);
    moves |= std::exchange(reached_before_[p.index], now) != now;
  }
  if (moves || is_held_up())
    return false;
  auto why = stall_error(*this, target()->epoch());
  if (auto x = failure_of(why)) {
    x->detail +=
        "; of " + std::to_string(what_->requests.size()) + " requests of the step, they are past";
    for (auto& p : parts())
      x->detail += (p.index == 0 ? " " : ", ") + std::to_string(reached(p));
    why = make_error(std::move(*x));
  }
  target()->fail(why);
  return true;
}

void step_operation::describe_to(flight_entry& x, const part& p) const noexcept {
  collective_operation::describe_to(x, p);
  x.progress.reached = static_cast<std::uint16_t>(std::min<std::uint32_t>(reached(p), UINT16_MAX));
}

/// Enqueues the requests of a rank one by one, all in the stream of the part.
caf::error step_operation::enqueue(part& p, lane& on, enqueued& to) {
  auto made = what_->requests.make(where_, {}, {});
  if (!made)
    return std::move(made.error());
  auto* const word = (*progress_)[p.index].word.load();
  for (std::size_t i = 0; i < made->all.size(); ++i) {
    const auto index = made->request_of[i];
    const auto& request = what_->requests[index];
    if (request.is_collective()) {
      const step_position here{static_cast<std::uint32_t>(index + 1), word};
      static_cast<collective_operation&>(*made->all[i])
          .run_on(target(), word != nullptr ? here : step_position{});
    }
    if (auto why = enqueue_request(p, on, *made->all[i]))
      return in_step(index, request.verb, why);
    to.has_collectives |= request.is_collective();
  }
  to.made = std::move(made->all);
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
  enqueued keeps;
  const auto graph = on.device().record_graph(on.stream(p), [&] { return enqueue(p, on, keeps); });
  if (!graph)
    return graph.error();
  to.graph = {on, *graph, std::move(keeps.made)};
  to.failures = 0;
  return {};
}

caf::error step_operation::replay(part& p, lane& on, rank_graph& what) {
  what.ends_with_graph = true;
  return target()->call(static_cast<std::size_t>(p.rank), on, [&](backend_communicator& rank) {
    return rank.replay(what.graph.view(), on.stream(p), on.device(),
                       (*progress_)[p.index].word.load());
  });
}

} // namespace troupe::detail
