#include "admission/request_checks.hpp"

#include "admission/access_order.hpp"
#include "foundation/error_text.hpp"
#include "lane/lane.hpp"
#include "operation/device_state.hpp"
#include <troupe/error.hpp>

#include <algorithm>
#include <string>
#include <utility>

namespace troupe::detail {

namespace {

/// Returns whether one check of the whole range accepts all reads of `run`.
bool all_readable(locked lock, std::span<const use> run) {
  return std::any_of(run.begin(), run.end(), [](const use& u) { return u.reads; }) &&
         !run.front().memory->check_readable(lock, run.front().begin, run.back().end);
}

/// Returns whether a short check accepts `u`. False: `check_uses` looks more closely.
bool plainly_right(const use& u) {
  auto& memory = *u.memory;
  return !memory.stale() && !memory.acquired_for_writing &&
         (!u.writes || (memory.acquired_for_reading == 0 && !memory.read_only())) &&
         (!u.reads || (memory.whole() && !operation::any_failing()));
}

} // namespace

caf::error check_lanes(locked lock, const operation& op, bool bounded, queue_bound bound) {
  for (auto& p : op.parts()) {
    auto refuse = [&](errc code, std::string detail) {
      auto why = op.describe(code, std::move(detail));
      why.device = p.on->state().ordinal();
      why.parts.clear();
      return make_error(std::move(why));
    };
    auto phase = p.on->state().phase();
    if (phase == device_phase::failed || phase == device_phase::shut_down)
      return refuse(errc::unavailable, device_is(phase));
    if (bounded && !p.on->accepts(lock, bound))
      return refuse(errc::overloaded, std::to_string(limit_of(p.on->queue_limit(), bound)) +
                                          " operations already wait for the device");
  }
  return {};
}

caf::error check_uses(locked lock, const operation& request, const operation& op,
                      std::span<const use> uses) {
  if (std::all_of(uses.begin(), uses.end(), plainly_right))
    return {};
  auto refuse = [&](const use& u, errc code, const char* reason) {
    auto why = request.describe(code, reason);
    why.rank = op.parts()[u.part].rank;
    why.device = u.memory->home().ordinal();
    why.generation = u.memory->generation();
    why.parts.clear();
    return make_error(std::move(why));
  };
  // Check for stale memory first: it stays stale, whatever else is wrong with the other uses.
  for (auto& u : uses)
    if (u.memory->stale())
      return refuse(u, errc::stale_ref, "the device was reset or lost after the allocation");
  while (!uses.empty()) {
    auto run = first_run(uses);
    uses = uses.subspan(run.size());
    bool readable = run.size() > 1 && all_readable(lock, run);
    for (auto& u : run) {
      if (u.memory->acquired_for_writing || (u.writes && u.memory->acquired_for_reading != 0))
        return refuse(u, errc::buffer_acquired,
                      "a user stream, another library or another process has acquired the buffer");
      if (u.writes && u.memory->read_only())
        return refuse(u, errc::buffer_acquired, "the memory is lent for reading only");
      if (u.reads && !readable)
        if (auto error = u.memory->check_readable(lock, u.begin, u.end, u.accepted); error)
          return error;
    }
  }
  return {};
}

} // namespace troupe::detail
