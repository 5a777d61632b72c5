/// `world_core`: the requests for collectives and messages, of all ranks or of one.
#include "collective/collective_operation.hpp"
#include "collective/collective_writes.hpp"
#include "collective/rank_request.hpp"
#include "foundation/error_text.hpp"
#include "operation/admission_lock.hpp"
#include "operation/skipping.hpp"
#include "runtime/retried_request.hpp"
#include "world/world_core.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace troupe::detail {

namespace {

/// Sorts calls by rank, and leaves each rank's calls in their order. A world has few ranks.
void sort_by_rank(std::vector<rank_call>& calls, std::size_t ranks) {
  if (calls.size() > 4 * ranks) {
    std::ranges::stable_sort(calls, {}, &rank_call::rank);
    return;
  }
  for (auto i = calls.begin(); i != calls.end(); ++i)
    std::rotate(std::upper_bound(calls.begin(), i, i->rank,
                                 [](std::size_t rank, auto& x) { return rank < x.rank; }),
                i, i + 1);
}

/// Sorts `calls` by rank.
/// @errors errc::invalid_argument: two calls of a rank use memory that one of them writes
caf::error order_by_rank(const char* verb, std::vector<rank_call>& calls,
                         std::span<const std::shared_ptr<lane>> lanes) {
  sort_by_rank(calls, lanes.size());
  for (auto a = calls.begin(); a != calls.end(); ++a)
    for (auto b = a + 1; b != calls.end() && b->rank == a->rank; ++b)
      if (conflict(*a, *b))
        return make_error({.code = errc::invalid_argument,
                           .detail = "two calls of the rank use memory that one of them writes",
                           .verb = verb,
                           .device = lanes[a->rank]->state().ordinal(),
                           .rank = static_cast<int>(a->rank)});
  return {};
}

/// Returns whether each of `size` ranks has a call.
bool has_all_ranks(std::span<const rank_call> sorted, std::size_t size) noexcept {
  std::size_t next = 0;
  for (auto& x : sorted)
    next += x.rank == next;
  return next == size;
}

constexpr std::size_t group_limit = 1024;

} // namespace

std::shared_ptr<collective_operation> world_core::operation_of_calls(const char* verb,
                                                                     std::vector<rank_call> calls,
                                                                     std::uint64_t membership,
                                                                     rank_set without) {
  if (!is_whole() || !without.empty() || !has_all_ranks(calls, size()))
    return std::make_shared<collective_operation>(verb, shared_from_this(), std::move(calls),
                                                  membership, without);
  auto ready = new_operation();
  ready->begin(verb, shared_from_this(), std::move(calls), membership);
  return ready;
}

world_core::answer world_core::start(const char* verb, std::vector<rank_call> calls,
                                     const request_options& options, rank_set without) {
  return start(operation_of_calls(verb, std::move(calls), options.membership, without), options);
}

/// Starts the request whose operations `prepare` makes, and makes it again after losses.
/// `first`: the first one, or why it is refused.
template <class Prepare>
world_core::answer world_core::start_retried(std::shared_ptr<collective_operation> first,
                                             const request_options& options, Prepare prepare) {
  const auto* verb = first->verb();
  first->deadline = from_now(options.deadline.count() != 0 ? options.deadline : limits_.deadline);
  return detail::start_retried(runtime_, answer{std::move(first)}, options,
                               [verb, prepare = std::move(prepare)]() -> answer {
                                 auto next = prepare();
                                 return next ? answer{std::move(*next)}
                                             : refused_operation<collective_done>(
                                                   verb, std::move(next.error()));
                               });
}

/// Returns an operation with one part for each rank of this process, to begin.
std::shared_ptr<collective_operation> world_core::new_operation() {
  auto result = spare_operation_.take();
  return result ? result : std::make_shared<collective_operation>(*this);
}

world_core::answer world_core::start(std::shared_ptr<collective_operation> op,
                                     const request_options& options) {
  op->deadline = from_now(options.deadline.count() != 0 ? options.deadline : limits_.deadline);
  runtime_->start(op, options);
  if (!is_whole() && op->position() == 0)
    lose_call(*op);
  spare_operation_.refill([this] {
    auto result = std::make_shared<collective_operation>(*this);
    result->make_room_for_calls();
    return result;
  });
  return op;
}

/// Answers a request without calls at once: it has no lane and no position in the order.
world_core::answer world_core::do_nothing(const char* verb, const request_options& options,
                                          rank_set without) {
  auto result = std::make_shared<operation_of<collective_done>>(verb, 0);
  if (options.deadline.count() < 0) {
    result->answer(result->late());
    return result;
  }
  caf::error why;
  {
    admission_lock lock;
    why = check_view(lock, *result, options.membership, without);
    auto& done = result->value;
    done.operation = result->number();
    done.epoch = epoch_;
    done.membership = membership_;
    if (!without.empty())
      for (auto& x : members_)
        done.ranks.push_back(x.rank);
  }
  result->answer(std::move(why));
  return result;
}

/// Ends the communicator, because a call of this process's rank was refused. The other ranks still
/// make theirs, which must not match the next call of this rank.
void world_core::lose_call(const collective_operation& refused) {
  const auto why = refused.error();
  if (fails_validation(why) || code_of(why) == errc::membership_changed)
    return;
  std::shared_ptr<communicator> current;
  {
    admission_lock lock;
    current = current_;
  }
  if (current)
    current->fail(refused.end_of_communicator(current->epoch(), why));
}

// -- checks

caf::error world_core::check_whole(const char* verb) const {
  if (is_whole() && !on_live_)
    return {};
  return refusal(verb, errc::not_supported,
                 is_whole() ? "the world's ranks are driven by a program, in their own processes"
                            : "the other ranks are in other processes: each rank makes its "
                              "own calls");
}

caf::expected<rank_set> world_core::to_leave_out(const char* verb,
                                                 const request_options& options) const {
  const auto now = absent();
  if (now.empty() || options.allow_shrunk)
    return now;
  const operation request{verb, 0};
  if (auto error = check_view(admission_lock{}, request, options.membership, {}); error)
    return error;
  return rank_set{};
}

/// Checks whether rank `rank` may make its own calls here.
caf::error world_core::check_rank(const char* verb, int rank) const {
  if (auto error = is_whole() ? check_whole(verb) : caf::error{}; error)
    return error;
  if (static_cast<std::size_t>(rank) >= size())
    return refusal(verb, errc::invalid_argument, out_of_range("rank", rank, size()));
  if (!is_whole() && static_cast<std::size_t>(rank) != local_ranks_.front())
    return refusal(verb, errc::invalid_argument,
                   "rank " + std::to_string(rank) + " is not in this process");
  return {};
}

caf::error world_core::check_deadline(const char* verb, int rank,
                                      const request_options& options) const {
  if (options.deadline.count() >= 0)
    return {};
  return make_error({.code = errc::deadline_exceeded,
                     .detail = "its deadline was over before it began",
                     .verb = verb,
                     .device = lanes_[static_cast<std::size_t>(rank)]->state().ordinal(),
                     .rank = rank});
}

/// Counts a refused call that did not become a request.
void world_core::count_refused(const rank_end& of, const caf::error& why,
                               std::uint64_t membership) {
  if (!is_whole() || !counts_among_calls(why, membership))
    return;
  runtime_->admissions().drain(); // its rank's earlier calls come first
  std::shared_ptr<collective_operation> ended;
  {
    admission_lock lock;
    if (!counts_calls_of(lock, of))
      return;
    ended = matching_.count_refused(lock, of, why, membership_);
    matching_.passed_over(lock, of);
  }
  if (ended)
    ended->fail(why);
}

// -- of all ranks

namespace {

const char* verb_of(const collective_view& what) noexcept {
  return what.kind == collective_kind::send ? "send_recv" : to_string(what.kind).data();
}

/// Returns a copy of `x` that owns its handles.
collective owned(const collective_view& x) {
  return {x.kind, {x.send.begin(), x.send.end()},       {x.recv.begin(), x.recv.end()},
          x.op,   {x.factors.begin(), x.factors.end()}, x.rank,
          x.peer, {x.counts.begin(), x.counts.end()}};
}

} // namespace

caf::expected<rank_set> world_core::check_and_leave_out(const char* verb,
                                                        const request_options& options) const {
  if (auto error = check_whole(verb); error)
    return error;
  return to_leave_out(verb, options);
}

world_core::prepared world_core::prepare(const collective_view& what,
                                         const request_options& options, rank_set without) {
  const auto* verb = verb_of(what);
  if (what.kind == collective_kind::send || !without.empty()) {
    std::vector<rank_call> calls;
    auto error = add_rank_calls(calls, verb, what, lanes_, without);
    if (!error && what.kind == collective_kind::send)
      error = order_by_rank(verb, calls, lanes_); // also for a message from a rank to itself
    if (error)
      return error;
    return operation_of_calls(verb, std::move(calls), options.membership, without);
  }
  auto ready = new_operation();
  auto calls = ready->room_for_calls();
  if (auto error = add_rank_calls(calls, verb, what, lanes_); error)
    return error;
  ready->begin(verb, shared_from_this(), std::move(calls), options.membership);
  return ready;
}

world_core::prepared world_core::prepare(const collective_view& what,
                                         const request_options& options) {
  auto without = check_and_leave_out(verb_of(what), options);
  return without ? prepare(what, options, *without) : std::move(without.error());
}

world_core::answer world_core::run(const collective_view& what, const request_options& options) {
  auto ready = prepare(what, options);
  if (!ready)
    return refused_and_skipped<collective_done>(
        verb_of(what), std::move(ready.error()), options.retry_of,
        [&](std::vector<use>& to) { add_writes(to, what, size()); });
  if (options.max_retries == 0)
    return start(std::move(*ready), options);
  return start_retried(std::move(*ready), options,
                       [self = shared_from_this(), x = owned(what), options] {
                         return self->prepare(collective_view{x}, options);
                       });
}

world_core::prepared world_core::prepare(const group& what, rank_set without) {
  constexpr auto verb = "group";
  if (what.calls.size() > group_limit)
    return refusal(verb, errc::invalid_argument,
                   "a group of " + std::to_string(what.calls.size()) + " calls: the limit is " +
                       std::to_string(group_limit));
  if (what.calls.empty())
    return std::shared_ptr<collective_operation>{};
  std::vector<rank_call> calls;
  calls.reserve(2 * what.calls.size());
  for (auto& x : what.calls)
    if (auto error = add_rank_calls(calls, verb, collective_view{x}, lanes_, without); error)
      return error;
  if (auto error = order_by_rank(verb, calls, lanes_); error)
    return error;
  return operation_of_calls(verb, std::move(calls), what.options.membership, without);
}

world_core::prepared world_core::prepare(const group& what) {
  auto without = check_and_leave_out("group", what.options);
  return without ? prepare(what, *without) : std::move(without.error());
}

world_core::answer world_core::run(const group& what) {
  constexpr auto verb = "group";
  const auto refuse = [&](caf::error why) {
    return refused_and_skipped<collective_done>(
        verb, std::move(why), what.options.retry_of,
        [&](std::vector<use>& to) { add_writes(to, what, size()); });
  };
  const auto without = check_and_leave_out(verb, what.options);
  if (!without)
    return refuse(without.error());
  auto ready = prepare(what, *without);
  if (!ready)
    return refuse(std::move(ready.error()));
  if (!*ready)
    return do_nothing(verb, what.options, *without);
  if (what.options.max_retries == 0)
    return start(std::move(*ready), what.options);
  return start_retried(std::move(*ready), what.options,
                       [self = shared_from_this(), what] { return self->prepare(what); });
}

// -- of one rank

world_core::answer world_core::run(int rank, const collective_view& what,
                                   const request_options& options,
                                   std::shared_ptr<world_core> self) {
  auto* verb = to_string(what.kind).data();
  const auto index = static_cast<std::size_t>(std::max(rank, 0));
  auto refuse = [&](caf::error why) {
    auto result = refused_and_skipped<collective_done>(
        verb, std::move(why), options.retry_of,
        [&](std::vector<use>& to) { add_writes(to, what, size(), index); });
    count_refused({index, what.kind, static_cast<std::size_t>(what.peer)}, result->error(),
                  options.membership);
    return result;
  };
  if (auto error = check_rank(verb, rank); error)
    return refuse(std::move(error));
  if (auto error = check_no_retries(verb, options); error)
    return refuse(std::move(error));
  if (!is_whole() && troupe::is_message(what.kind) && what.peer == rank)
    return refuse(refusal(verb, errc::invalid_argument,
                          "a message of a rank to itself needs both ends in one `exchange`"));
  auto without = to_leave_out(verb, options);
  if (!without)
    return refuse(std::move(without.error()));
  auto call = rank_call_of(verb, what, index, lanes_, *without);
  if (!call)
    return refuse(std::move(call.error()));
  if (!is_whole() && without->empty())
    return start_alone(verb, std::move(*call), options, std::move(self));
  if (!is_whole()) {
    std::vector<rank_call> calls;
    calls.push_back(std::move(*call));
    return start(verb, std::move(calls), options, *without);
  }
  if (auto error = check_deadline(verb, rank, options); error)
    return refuse(std::move(error));
  auto request = new_request(verb, std::move(*call), *without, options, std::move(self));
  request->start(options.room);
  make_spares_of(index);
  return request;
}

/// Starts the operation with this rank's call alone. The other ranks' processes make the other
/// calls, and this process does not compare them.
world_core::answer world_core::start_alone(const char* verb, rank_call call,
                                           const request_options& options,
                                           std::shared_ptr<world_core> self) {
  auto ready = new_operation();
  auto calls = ready->room_for_calls();
  calls.push_back(std::move(call));
  ready->begin(verb, std::move(self), std::move(calls), options.membership);
  return start(std::move(ready), options);
}

std::shared_ptr<rank_request> world_core::new_request(const char* verb, rank_call call,
                                                      rank_set without,
                                                      const request_options& options,
                                                      std::shared_ptr<world_core> self) {
  auto result = matching_.request_pools[call.rank].take();
  if (!result)
    result = std::make_shared<rank_request>();
  result->begin(verb, std::move(self), std::move(call), without, options);
  result->deadline = from_now(options.deadline.count() != 0 ? options.deadline : limits_.deadline);
  return result;
}

/// Makes the objects for the rank's next call and the operation that it forms with others' calls.
void world_core::make_spares_of(std::size_t rank) {
  matching_.request_pools[rank].refill([] { return std::make_shared<rank_request>(); });
  matching_.joint_pool.refill([this] {
    auto next = std::make_shared<collective_operation>(*this);
    return next;
  });
}

world_core::answer world_core::run(const exchange& what, std::shared_ptr<world_core> self) {
  constexpr auto verb = "exchange";
  auto refuse = [&](caf::error why) {
    auto result =
        refused_and_skipped<collective_done>(verb, std::move(why), what.options.retry_of,
                                             [&](std::vector<use>& to) { add_writes(to, what); });
    auto count = [&](const std::vector<message_end>& ends, collective_kind of) {
      for (auto& x : ends)
        count_refused({static_cast<std::size_t>(what.rank), of, static_cast<std::size_t>(x.peer)},
                      result->error(), what.options.membership);
    };
    count(what.sends, collective_kind::send);
    count(what.recvs, collective_kind::recv);
    return result;
  };
  if (auto error = check_rank(verb, what.rank); error)
    return refuse(std::move(error));
  if (auto error = check_no_retries(verb, what.options); error)
    return refuse(std::move(error));
  const auto ends = what.sends.size() + what.recvs.size();
  if (ends > group_limit)
    return refuse(refusal(verb, errc::invalid_argument,
                          "an exchange of " + std::to_string(ends) + " messages: the limit is " +
                              std::to_string(group_limit)));
  auto without = to_leave_out(verb, what.options);
  if (!without)
    return refuse(std::move(without.error()));
  auto calls = exchange_calls(verb, what, lanes_, *without);
  if (!calls)
    return refuse(std::move(calls.error()));
  if (auto error = order_by_rank(verb, *calls, lanes_); error)
    return refuse(std::move(error));
  if (calls->empty())
    return do_nothing(verb, what.options, *without);
  if (!is_whole())
    return start(verb, std::move(*calls), what.options, *without);
  if (auto error = check_deadline(verb, what.rank, what.options); error)
    return refuse(std::move(error));
  std::vector<std::shared_ptr<rank_request>> requests;
  for (auto& x : *calls) {
    auto* of_message = to_string(x.call.what).data();
    requests.push_back(new_request(of_message, std::move(x), *without, what.options, self));
  }
  auto result = std::make_shared<exchange_request>(runtime_, std::move(requests));
  result->start(what.options.room);
  make_spares_of(static_cast<std::size_t>(what.rank));
  return result;
}

} // namespace troupe::detail
