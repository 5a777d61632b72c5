#include "core/collective_operations.hpp"

#include "core/buffer.hpp"
#include "core/device_state.hpp"
#include "core/lane.hpp"
#include "core/world_core.hpp"

#include <algorithm>
#include <utility>

namespace troupe::detail {

namespace {

/// Why a communicator ends because of part `p` of `op`.
failure end_of(const operation& op, const part& p, std::uint64_t epoch, errc code,
               std::string detail) {
  auto x = op.describe(code, std::move(detail));
  x.rank = p.rank;
  x.device = p.on->state().ordinal();
  x.generation = p.on->state().generation();
  x.epoch = epoch;
  return x;
}

/// A call on a communicator for part `p` of `op` gave `error`. One that is of the communicator ends
/// it.
caf::error after_call(const operation& op, const part& p, communicator& on, caf::error error) {
  auto cause = failure_of(error);
  if (!cause || severity_of(cause->code) != severity::communicator)
    return error;
  auto x = end_of(op, p, on.epoch(), cause->code, std::move(cause->detail));
  x.api = std::move(cause->api);
  x.native_name = std::move(cause->native_name);
  x.native_code = cause->native_code;
  on.fail(make_error(std::move(x)));
  return on.dead();
}

/// What became of part `p` of `op`, whose call on a communicator gave `error`.
caf::expected<issue_outcome> issued(operation& op, const part& p, communicator& on,
                                    caf::error error) {
  error = after_call(op, p, on, std::move(error));
  if (error && !on.live())
    op.fail(on.dead()); // everything pending on it gets the one cause (INV-7)
  if (error)
    return error;
  return issue_outcome::enqueued;
}

caf::error loss(const operation& op, const part& p, std::uint64_t epoch, const caf::error& why) {
  auto cause = failure_of(why);
  if (cause && severity_of(cause->code) >= severity::communicator)
    return why;
  auto x = end_of(op, p, epoch, errc::rank_not_issued,
                  why ? "a rank could not be issued after others had been: " + troupe::describe(why)
                      : "a rank could not be issued after others had been");
  if (cause) {
    x.api = cause->api;
    x.native_name = cause->native_name;
    x.native_code = cause->native_code;
  }
  return make_error(std::move(x));
}

/// Why a communicator ends because `op` stands still.
caf::error stall(const operation& op, std::uint64_t epoch) {
  auto x = op.describe(errc::stalled, "not done " + std::to_string(op.stall_limit / 1'000'000) +
                                          " ms after its first rank started");
  x.epoch = epoch;
  // The culprit is the one rank that is behind all others, if there is one.
  auto least = std::min_element(x.parts.begin(), x.parts.end());
  if (std::count(x.parts.begin(), x.parts.end(), *least) == 1) {
    x.rank = static_cast<int>(least - x.parts.begin());
    for (auto& p : op.parts())
      if (p.rank == x.rank) {
        x.device = p.on->state().ordinal();
        x.generation = p.on->state().generation();
      }
  }
  return make_error(std::move(x));
}

/// The number of different ranks in `calls`, which are sorted by rank.
std::size_t count_ranks(std::span<const rank_call> calls) {
  std::size_t result = 0;
  for (std::size_t i = 0; i < calls.size(); ++i)
    result += i == 0 || calls[i].rank != calls[i - 1].rank;
  return result;
}

} // namespace

// -- collective

collective_operation::collective_operation(const char* verb, std::shared_ptr<world_core> world,
                                           std::vector<rank_call> calls, std::uint64_t membership)
    : operation_of(verb, count_ranks(calls)), world_(std::move(world)), calls_(std::move(calls)),
      membership_(membership) {
  stall_limit = world_->limits().stall_limit.count();
  calls_of_.reserve(parts().size());
  expect_uses(2 * calls_.size());
  auto next = calls_.begin();
  for (auto& p : parts()) {
    p.rank = static_cast<int>(next->rank);
    p.on = world_->lanes()[next->rank].get();
    p.stream = stream_kind::collective;
    auto first = next;
    for (; next != calls_.end() && next->rank == first->rank; ++next)
      add_uses(*next, p.index);
    calls_of_.push_back({first, next});
  }
}

void collective_operation::add_uses(const rank_call& call, std::size_t index) {
  auto add = [&](const memory_range& r, bool reads, bool writes) {
    add_use({r.of->memory(), r.begin, r.end, reads, writes, index});
  };
  if (call.send && call.recv && call.call.send == call.call.recv && call.send.end == call.recv.end)
    return add(call.recv, true, true);
  if (call.send)
    add(call.send, true, false);
  if (call.recv)
    add(call.recv, false, true);
}

caf::error collective_operation::on_check() const { return world_->check_view(*this, membership_); }

caf::error collective_operation::on_admit() {
  value.operation = number();
  if (!world_->waits())
    return {};
  if (auto error = world_->enter_queue(*this); error)
    return error;
  waiting_.store(true);
  return {};
}

void collective_operation::wait_no_more() noexcept {
  if (waiting_.exchange(false))
    world_->leave_queue();
}

void collective_operation::before_answer(const caf::error&) noexcept { wait_no_more(); }

const void* collective_operation::waits_for() const {
  return world_->waits() ? world_.get() : nullptr;
}

void collective_operation::on_submit() {
  wait_no_more();
  communicator_ = world_->join(value);
  communicator_key_.store(communicator_.get());
}

caf::expected<issue_outcome> collective_operation::issue(part& p, lane& on) {
  auto mine = calls_of_[p.index];
  if (std::all_of(mine.begin(), mine.end(), [](const rank_call& x) { return x.empty(); }))
    return issue_outcome::finished;
  auto stream = on.stream(p.stream);
  auto error = communicator_->call(mine.front().rank, on, [&](backend_communicator& rank) {
    if (mine.size() == 1) {
      auto call = mine.front().complete();
      return rank.enqueue({&call, 1}, stream);
    }
    std::vector<collective_call> calls;
    calls.reserve(mine.size());
    for (auto& x : mine)
      if (!x.empty())
        calls.push_back(x.complete());
    return rank.enqueue(calls, stream);
  });
  return issued(*this, p, *communicator_, std::move(error));
}

/// An error that came behind the call's back ends the work too, which then is no success.
void collective_operation::on_part_done(part& p) noexcept {
  if (failed())
    return;
  auto error =
      communicator_->call(static_cast<std::size_t>(p.rank), *p.on,
                          [](backend_communicator& rank) { return rank.asynchronous_error(); });
  static_cast<void>(after_call(*this, p, *communicator_, std::move(error)));
}

void collective_operation::on_lost_part(part& p, const caf::error& why) noexcept {
  communicator_->fail(loss(*this, p, communicator_->epoch(), why));
}

void collective_operation::on_stall() noexcept {
  communicator_->fail(stall(*this, communicator_->epoch()));
}

// -- connect

connect_operation::connect_operation(std::shared_ptr<communicator> target,
                                     const std::vector<std::shared_ptr<lane>>& lanes,
                                     std::chrono::nanoseconds limit)
    : operation_of("connect", lanes.size()), communicator_(std::move(target)) {
  stall_limit = limit.count();
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    auto& p = parts()[i];
    p.on = lanes[i].get();
    p.rank = static_cast<int>(i);
    p.stream = stream_kind::collective;
  }
}

caf::expected<issue_outcome> connect_operation::issue(part& p, lane& on) {
  if (arrived_.fetch_add(1) + 1 == parts().size())
    for (auto& other : parts())
      other.on->wake();
  return proceed(p, on);
}

caf::expected<issue_outcome> connect_operation::proceed(part& p, lane& on) {
  if (arrived_.load() < parts().size() && communicator_->live())
    return issue_outcome::continues;
  auto error = communicator_->call(
      p.index, on, [&](backend_communicator& rank) { return rank.connect(on.stream(p.stream)); });
  return issued(*this, p, *communicator_, std::move(error));
}

void connect_operation::on_lost_part(part& p, const caf::error& why) noexcept {
  communicator_->fail(loss(*this, p, communicator_->epoch(), why));
}

void connect_operation::on_stall() noexcept {
  communicator_->fail(stall(*this, communicator_->epoch()));
}

} // namespace troupe::detail
