/// `collective_operation` on the lanes: its issue, and its results.
#include "collective/collective_operation.hpp"
#include "collective/collective_world.hpp"
#include "collective/communicator.hpp"
#include "collective/rank_request.hpp"
#include "collective/shrunk_calls.hpp"
#include "lane/lane.hpp"

#include <algorithm>
#include <utility>

namespace troupe::detail {

const rank_call& collective_operation::first_call_of(const part& p) noexcept {
  return *static_cast<const rank_call*>(p.needs);
}

bool collective_operation::moves_nothing(const part& p) const noexcept {
  if (one_each_)
    return first_call_of(p).empty();
  auto calls = calls_of(p);
  return std::all_of(calls.begin(), calls.end(), [](auto* x) { return x->empty(); });
}

caf::expected<issue_outcome> collective_operation::issue(part& p, lane& on) {
  if (moves_nothing(p))
    return issue_outcome::finished;
  if (!communicator_->absent().empty())
    return issue_shrunk(p, on);
  auto stream = on.stream(p);
  auto index = static_cast<std::size_t>(p.rank);
  auto error = communicator_->call(index, on, [&](backend_communicator& rank) {
    if (one_each_) {
      auto call = first_call_of(p).complete();
      return rank.enqueue({&call, 1}, stream, in_step_);
    }
    std::vector<collective_call> calls;
    calls.reserve(calls_of(p).size());
    for (auto* x : calls_of(p))
      if (!x->empty())
        calls.push_back(x->complete());
    return rank.enqueue(calls, stream, in_step_);
  });
  return issued(*this, p, *communicator_, std::move(error));
}

caf::expected<issue_outcome> collective_operation::issue_shrunk(part& p, lane& on) {
  auto stream = on.stream(p);
  shrunk_calls all;
  for (auto* x : calls_of(p))
    if (!x->empty())
      add_shrunk(*x, *communicator_, all);
  for (auto& x : all.moves)
    if (auto error = on.device().copy(x.target, x.source, x.size_bytes,
                                      copy_direction::device_to_device, stream);
        error)
      return error;
  return issued(
      *this, p, *communicator_,
      communicator_->call(static_cast<std::size_t>(p.rank), on, [&](backend_communicator& rank) {
        return rank.enqueue(all.calls, stream);
      }));
}

caf::error collective_operation::mark_end(part& p, event_view event, stream_view stream,
                                          backend_device& device) {
  const auto rank = static_cast<std::size_t>(p.rank);
  if (!p.is_placeholder && !failed() && // otherwise it may not be what was enqueued last
      !communicator_->call(
          rank, *p.on, [&](backend_communicator& x) { return x.mark_end(event, stream, device); }))
    return {};
  return device.record(event, stream);
}

/// Checks for an asynchronous error, which ends the work too, but without success.
void collective_operation::on_part_done(part& p) noexcept {
  if (failed())
    return;
  auto error =
      communicator_->call(static_cast<std::size_t>(p.rank), *p.on,
                          [](backend_communicator& rank) { return rank.asynchronous_error(); });
  error = after_call(*this, p, *communicator_, std::move(error));
  if (error && !communicator_->live()) // it is unknown whether this work was done
    fail(communicator_->dead());
  if (!requests_.empty() && !failed())
    tell(p);
}

/// Completes the requests of the part: they need not wait for the parts of other ranks. But while
/// an operation has failed and is not settled, its marks may still come to this one, through a
/// cancelled operation between them. Then the requests wait until this operation settles.
void collective_operation::tell(part& p) noexcept {
  if (any_failing())
    return;
  p.delivered.store(true, std::memory_order_release); // before the requester's next action
  bool known = true;
  for (auto& x : requests_of(p))
    known &= x->succeed();
  if (!known) // a request has completed with an error
    p.delivered.store(false, std::memory_order_release);
}

bool collective_operation::has_parts_elsewhere() const noexcept {
  return communicator_ && !world_->is_whole();
}

caf::error collective_operation::end_of_communicator(std::uint64_t epoch,
                                                     const caf::error& why) const {
  return loss_error(*this, parts().front(), epoch, why);
}

void collective_operation::on_lost_part(part& p, const caf::error& why) noexcept {
  communicator_->fail_unless_lost(loss_error(*this, p, communicator_->epoch(), why));
}

/// Returns whether the operation is held up by other work that has a limit of its own.
bool collective_operation::is_held_up() const noexcept {
  return std::any_of(parts().begin(), parts().end(), [this](const part& p) {
    switch (p.at.load(std::memory_order_acquire)) {
    case part::state::queued:
      return p.on->held() || p.on->connected_after(first_started_at());
    case part::state::issued:
      return p.behind_others.load(std::memory_order_relaxed) ||
             p.on->connected_after(first_started_at());
    case part::state::issuing:
    case part::state::started:
      return p.on->connected_after(first_started_at());
    case part::state::done:
    case part::state::skipped:
    case part::state::dropped:
      break;
    }
    return false;
  });
}

bool collective_operation::on_stall() noexcept {
  if (over())
    return true;
  if (is_held_up())
    return false;
  communicator_->fail(stall_error(*this, communicator_->epoch()));
  return true;
}

} // namespace troupe::detail
