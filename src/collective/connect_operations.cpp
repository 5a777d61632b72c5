#include "collective/connect_operations.hpp"

#include "collective/communicator.hpp"
#include "foundation/log.hpp"
#include "lane/lane.hpp"
#include "operation/symmetric_memory.hpp"

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

std::int64_t now_in_nanoseconds() noexcept { return clock::now().time_since_epoch().count(); }

void set_once(std::atomic<std::int64_t>& time) noexcept {
  std::int64_t none = 0;
  time.compare_exchange_strong(none, now_in_nanoseconds());
}
} // namespace

connect_operation::connect_operation(std::shared_ptr<communicator> target, connect_scope what,
                                     std::chrono::nanoseconds patience,
                                     std::chrono::nanoseconds limit, const char* verb)
    : operation_of(verb, target->lanes().size()), communicator_(std::move(target)), what_(what),
      limit_(limit), has_arrived_(parts().size()) {
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
  auto given_up = [this] { return turn_.load() == turn::given_up; };
  if (arrived_.load() < parts().size() && communicator_->live() && !given_up())
    return issue_outcome::continues;
  auto error = communicator_->call(rank_of(p), on, [&](backend_communicator& rank) {
    auto none = turn::to_come;
    turn_.compare_exchange_strong(none, turn::there);
    if (given_up()) // the operation has failed, the communicator has not
      return caf::error{};
    set_once(entered_at_);
    on.begin_connecting();
    auto result = call(p, rank, on.stream(p));
    on.end_connecting();
    return result;
  });
  return issued(*this, p, *communicator_, std::move(error));
}

caf::error connect_operation::call(part&, backend_communicator& rank, stream_view stream) {
  return rank.connect(stream, what_);
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
  auto none = turn::to_come;
  if (may_give_up() && turn_.compare_exchange_strong(none, turn::given_up)) {
    fail(stall_error(*this, communicator_->epoch()));
    lane::wake(parts());
    return true;
  }
  communicator_->fail(stall_error(*this, communicator_->epoch()));
  return true;
}

void connect_operation::on_settled() noexcept {
  if (auto since = held_since_.load(); since != 0)
    log(log_level::debug, "connecting a communicator held its lanes for " +
                              std::to_string((now_in_nanoseconds() - since) / 1000) + " us" +
                              (failed() ? ", in vain" : ""));
}

// -- windows

register_operation::register_operation(std::shared_ptr<communicator> target,
                                       std::chrono::nanoseconds patience,
                                       std::chrono::nanoseconds limit,
                                       std::vector<std::shared_ptr<symmetric_memory>> memory)
    : connect_operation(std::move(target), connect_scope::everything, patience, limit, "register"),
      memory_(std::move(memory)) {}

/// Registers the windows of one rank. An error that is not of the device or the process fails the
/// operation here, so that it does not end the communicator.
caf::error register_operation::call(part& p, backend_communicator& rank, stream_view stream) {
  for (auto& x : memory_) {
    auto error = rank.register_window(x->address(rank_of(p)), x->size_bytes(), stream);
    if (!error)
      continue;
    if (severity_of(error) >= severity::device)
      return error;
    fail(error);
    return {};
  }
  return {};
}

void register_operation::on_lost_part(part& p, const caf::error& why) noexcept {
  if (!failed())
    connect_operation::on_lost_part(p, why);
}

deregister_operation::deregister_operation(std::shared_ptr<communicator> target,
                                           std::shared_ptr<symmetric_memory> memory)
    : operation_of("deregister", target->lanes().size()), communicator_(std::move(target)),
      memory_(std::move(memory)) {
  for (auto& p : parts()) {
    place_at(p, *communicator_);
    p.stream = stream_kind::none;
  }
}

caf::expected<issue_outcome> deregister_operation::issue(part& p, lane& on) {
  auto error = communicator_->call(rank_of(p), on, [&](backend_communicator& rank) {
    return rank.deregister_window(memory_->address(rank_of(p)));
  });
  if (error)
    return error;
  return issue_outcome::finished;
}

} // namespace troupe::detail
