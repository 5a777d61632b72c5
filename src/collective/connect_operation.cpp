#include "collective/connect_operation.hpp"

#include "collective/communicator.hpp"
#include "foundation/log.hpp"
#include "lane/lane.hpp"

#include <string>
#include <utility>

namespace troupe::detail {

namespace {
std::size_t rank_of(const part& p) noexcept { return static_cast<std::size_t>(p.rank); }

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
    p.on = communicator_->lanes()[p.index].get();
    p.rank = static_cast<int>(communicator_->local_ranks()[p.index]);
    p.stream = stream_kind::collective;
    p.tenant = &communicator_->tenant(rank_of(p));
  }
}

caf::expected<issue_outcome> connect_operation::issue(part& p, lane& on) {
  set_once(held_since_);
  part_started(p, held_since_.load());
  if (auto error = on.provide_streams(); error)
    log(log_level::warning, "communicators share a stream", error);
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

} // namespace troupe::detail
