#include "collective/connect_operation.hpp"

#include "collective/communicator.hpp"
#include "foundation/log.hpp"
#include "lane/lane.hpp"

#include <string>
#include <utility>

namespace troupe::detail {

namespace {
std::size_t rank_of(const part& p) noexcept { return static_cast<std::size_t>(p.rank); }

/// Sets lane and rank of a part; there is one part for each local rank of `x`.
void place_at(part& p, const communicator& x) noexcept {
  p.on = x.lanes()[p.index].get();
  p.rank = static_cast<int>(x.local_ranks()[p.index]);
}

/// Gives the lane another stream for collectives, if there is none for each communicator.
void provide_streams(lane& on) {
  if (auto error = on.provide_streams(); error)
    log(log_level::warning, "communicators share a stream", error);
}

std::int64_t now_in_nanoseconds() noexcept { return clock::now().time_since_epoch().count(); }

void set_once(std::atomic<std::int64_t>& time) noexcept {
  std::int64_t none = 0;
  time.compare_exchange_strong(none, now_in_nanoseconds());
}
} // namespace

connect_operation::connect_operation(std::shared_ptr<communicator> target, connect_scope what,
                                     std::chrono::nanoseconds patience,
                                     std::chrono::nanoseconds limit)
    : operation_of("connect", target->lanes().size()), communicator_(std::move(target)),
      what_(what), limit_(limit), has_arrived_(parts().size()) {
  stall_limit = patience.count();
  for (auto& p : parts()) {
    place_at(p, *communicator_);
    p.stream = stream_kind::collective;
    p.tenant = &communicator_->tenant(rank_of(p));
  }
}

caf::expected<issue_outcome> connect_operation::issue(part& p, lane& on) {
  set_once(held_since_);
  part_started(p, held_since_.load());
  provide_streams(on);
  return proceed(p, on);
}

caf::expected<issue_outcome> connect_operation::proceed(part& p, lane& on) {
  if (!has_arrived_[p.index] && on.collectives_over()) {
    has_arrived_[p.index] = 1;
    if (arrived_.fetch_add(1) + 1 == parts().size())
      lane::wake(parts());
  }
  if (arrived_.load() < parts().size() && communicator_->live())
    return issue_outcome::continues;
  auto error = communicator_->call(rank_of(p), on, [&](backend_communicator& rank) {
    set_once(entered_at_);
    on.begin_connecting();
    auto result = rank.connect(on.stream(p), what_);
    on.end_connecting();
    return result;
  });
  return issued(*this, p, *communicator_, std::move(error));
}

void connect_operation::describe_to(flight_entry& x, const part&) const noexcept {
  x.world = world;
  x.epoch = communicator_->epoch();
}

void connect_operation::on_lost_part(part& p, const caf::error& why) noexcept {
  communicator_->fail_unless_lost(loss_error(*this, p, communicator_->epoch(), why));
}

bool connect_operation::on_stall() noexcept {
  // The stall limit applies until all lanes have arrived, `limit_` applies afterwards.
  auto entered_at = entered_at_.load();
  if (arrived_.load() == parts().size() &&
      (entered_at == 0 || now_in_nanoseconds() - entered_at < limit_.count()))
    return false;
  communicator_->fail(stall_error(*this, communicator_->epoch()));
  return true;
}

void connect_operation::on_settled() noexcept {
  if (auto since = held_since_.load(); since != 0)
    log(log_level::debug, "connecting a communicator held its lanes for " +
                              std::to_string((now_in_nanoseconds() - since) / 1000) + " us" +
                              (failed() ? ", in vain" : ""));
}

access_operation::access_operation(std::shared_ptr<communicator> target)
    : operation_of("access", target->lanes().size()), communicator_(std::move(target)) {
  for (auto& p : parts()) {
    place_at(p, *communicator_);
    p.stream = stream_kind::none;
  }
}

caf::expected<issue_outcome> access_operation::issue(part&, lane& on) {
  provide_streams(on);
  for (auto& x : communicator_->lanes()) {
    const auto peer = x->state().ordinal();
    if (peer == on.state().ordinal())
      continue;
    if (auto error = on.device().enable_peer(peer); error)
      return error;
    if (auto error = on.device().admit_peer(peer); error)
      return error;
  }
  return issue_outcome::finished;
}

} // namespace troupe::detail
