#include "collective/collective_operations.hpp"

#include "collective/collective_world.hpp"
#include "collective/collective_writes.hpp"
#include "collective/shrunk_calls.hpp"
#include "foundation/log.hpp"
#include "foundation/prefetch.hpp"
#include "foundation/spin.hpp"
#include "lane/lane.hpp"
#include "operation/buffer.hpp"
#include "operation/device_state.hpp"
#include "operation/order.hpp"
#include "operation/skipping.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

namespace troupe::detail {

namespace {

/// How long a lane polls for the votes of the other lanes before it returns to its other work.
constexpr std::chrono::nanoseconds voting_patience = std::chrono::microseconds{2};

/// Returns why a communicator ends because of part `p` of `op`.
failure end_of(const operation& op, const part& p, std::uint64_t epoch, errc code,
               std::string detail) {
  auto x = op.describe(code, std::move(detail));
  x.rank = p.rank;
  x.device = p.on->state().ordinal();
  x.generation = p.on->state().generation();
  x.epoch = epoch;
  return x;
}

/// Handles `error`, the result of a call on a communicator for part `p` of `op`. A communicator
/// error ends the communicator. errc::out_of_memory ends it too: the rank may have stopped in the
/// middle of the work that needed the memory.
caf::error after_call(const operation& op, const part& p, communicator& on, caf::error error) {
  auto cause = failure_of(error);
  if (!cause ||
      (severity_of(cause->code) != severity::communicator && cause->code != errc::out_of_memory))
    return error;
  auto x = end_of(op, p, on.epoch(), cause->code, std::move(cause->detail));
  x.api = std::move(cause->api);
  x.native_name = std::move(cause->native_name);
  x.native_code = cause->native_code;
  on.fail_unless_lost(make_error(std::move(x)));
  return on.dead();
}

/// Returns the outcome of part `p` of `op`, whose call on a communicator gave `error`.
caf::expected<issue_outcome> issued(operation& op, const part& p, communicator& on,
                                    caf::error error) {
  error = after_call(op, p, on, std::move(error));
  if (error && !on.live())
    op.fail(on.dead()); // all pending operations on it get the same cause (INV-7)
  if (error)
    return error;
  return issue_outcome::enqueued;
}

/// Returns why the communicator ends because part `p` was not issued: for the reason `why`, or, if
/// there is none, because the operation failed before.
caf::error loss(const operation& op, const part& p, std::uint64_t epoch, caf::error why) {
  if (!why)
    why = op.cause();
  auto cause = failure_of(why);
  if (cause && severity_of(cause->code) >= severity::communicator)
    return why;
  std::string detail = op.has_parts_elsewhere() && !op.any_issued()
                           ? "a rank's call was not issued, and others may be"
                           : "a rank could not be issued after others had been";
  if (why)
    detail += ": " + troupe::describe(why);
  auto x = end_of(op, p, epoch, errc::rank_not_issued, std::move(detail));
  if (cause) {
    x.api = cause->api;
    x.native_name = cause->native_name;
    x.native_code = cause->native_code;
  }
  return make_error(std::move(x));
}

/// Returns why a communicator ends because `op` stalled.
caf::error stall(const operation& op, std::uint64_t epoch) {
  auto x = op.describe(errc::stalled, "not done " + std::to_string(op.stall_limit / 1'000'000) +
                                          " ms after its first rank started");
  x.epoch = epoch;
  // Name the one rank that is behind all others, if there is exactly one.
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

template <class F> void add_uses(const rank_call& call, std::size_t index, F add) {
  auto range = [&](const memory_range& r, bool reads, bool writes) {
    add({r.of->memory(), r.begin, r.end, reads, writes, static_cast<std::uint32_t>(index)});
  };
  if (call.send && call.recv && call.send.same_as(call.recv))
    return range(call.recv, true, true);
  if (call.send)
    range(call.send, true, false);
  if (call.recv)
    range(call.recv, false, true);
}

std::uint64_t sum_of(const std::vector<std::size_t>& counts) noexcept {
  return std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
}

/// Returns what the communicator must be connected for before `calls`, sorted by rank, are made.
connect_scope need_of(std::span<const rank_call> calls) noexcept {
  for (std::size_t i = 0; i < calls.size(); ++i)
    switch (calls[i].call.what) {
    case collective_kind::all_reduce:
    case collective_kind::reduce:
    case collective_kind::broadcast:
    case collective_kind::all_gather:
    case collective_kind::reduce_scatter:
    case collective_kind::barrier:
      if (i == 0 || calls[i].rank != calls[i - 1].rank)
        break;
      [[fallthrough]]; // a group: several calls of one rank
    default:
      return connect_scope::everything;
    }
  return connect_scope::collectives;
}

/// Returns the number of different ranks in `calls`, which are sorted by rank.
std::size_t count_ranks(std::span<const rank_call> calls) {
  std::size_t result = 0;
  for (std::size_t i = 0; i < calls.size(); ++i)
    result += i == 0 || calls[i].rank != calls[i - 1].rank;
  return result;
}

} // namespace

// -- collective

collective_operation::collective_operation(const char* verb,
                                           std::shared_ptr<collective_world> world,
                                           std::vector<rank_call> calls, std::uint64_t membership,
                                           rank_set absent)
    : operation_of(verb, count_ranks(calls)), world_(std::move(world)), membership_(membership),
      absent_(absent) {
  take(std::move(calls));
  for (auto& p : parts())
    place_part(p, calls_of(p).front()->rank, *world_);
  add_all_uses();
}

namespace {

/// The index of a rank's call in its operation, and the index of the part that the call belongs to.
struct call_slot {
  std::size_t call;
  std::size_t part;
};

call_slot slot_of(const rank_call& x, rank_set absent) noexcept {
  if (!x.is_message()) {
    auto i = x.rank - absent.below(x.rank);
    return {i, i};
  }
  auto peer = static_cast<std::size_t>(x.call.peer);
  if (x.rank == peer)
    return {x.call.what == collective_kind::send ? 0u : 1u, 0};
  auto i = x.rank < peer ? 0u : 1u;
  return {i, i};
}

std::size_t part_count(const rank_call& any, std::size_t ranks) noexcept {
  if (!any.is_message())
    return ranks;
  return static_cast<std::size_t>(any.call.peer) == any.rank ? 1 : 2;
}

const char* joint_verb(collective_kind x) noexcept {
  bool message = x == collective_kind::send || x == collective_kind::recv;
  return message ? "send_recv" : to_string(x).data();
}

} // namespace

collective_operation::collective_operation(std::shared_ptr<collective_world> world,
                                           const rank_call& any_call, rank_set absent)
    : operation_of(joint_verb(any_call.call.what),
                   part_count(any_call, world->size() - absent.size())),
      absent_(absent) {
  expect_calls(any_call.is_message() ? 2 : parts().size());
  if (any_call.is_message()) {
    auto peer = static_cast<std::size_t>(any_call.call.peer);
    for (auto& p : parts())
      place_part(p, p.index == 0 ? std::min(any_call.rank, peer) : std::max(any_call.rank, peer),
                 *world);
  } else {
    for (std::size_t rank = 0; rank < world->size(); ++rank)
      if (!absent.contains(rank))
        place_part(parts()[rank - absent.below(rank)], rank, *world);
  }
  of_ranks(std::move(world), any_call);
}

collective_operation::collective_operation(collective_world& world)
    : operation_of("", world.local_ranks().size()) {
  expect_calls(parts().size());
  for (auto& p : parts())
    place_part(p, world.local_ranks()[p.index], world);
}

void collective_operation::begin(const char* verb, std::shared_ptr<collective_world> world,
                                 std::vector<rank_call> calls, std::uint64_t membership) {
  operation_of::begin(verb);
  draw_number();
  world_ = std::move(world);
  membership_ = membership;
  requests_.clear();
  missing_ = 0;
  take(std::move(calls));
  add_all_uses();
}

void collective_operation::begin(std::shared_ptr<collective_world> world,
                                 const rank_call& any_call) {
  operation_of::begin(joint_verb(any_call.call.what));
  draw_number();
  of_ranks(std::move(world), any_call);
}

/// Initializes an operation that ranks request, before other threads may read the parts.
void collective_operation::of_ranks(std::shared_ptr<collective_world> world,
                                    const rank_call& any_call) {
  world_ = std::move(world);
  made_in_ = world_->membership();
  made_for_ = world_->absences();
  needs_ = need_of({&any_call, 1});
  for (auto& p : parts())
    p.uses_memory = any_call.call.what != collective_kind::barrier;
}

/// Prepares for `number` calls, one of each rank.
void collective_operation::expect_calls(std::size_t number) {
  calls_.resize(number);
  requests_.resize(number);
  missing_ = number;
  one_each_ = number == parts().size();
  ends_.resize(parts().size());
  for (std::size_t i = 0; i < ends_.size(); ++i)
    ends_[i] = i + 1;
  ends_.back() = number; // a message of a rank to itself
  expect_uses(2 * number);
}

void collective_operation::place_part(part& p, std::size_t rank, const collective_world& world) {
  stall_limit = world.limits().stall_limit.count();
  p.rank = static_cast<int>(rank);
  p.on = world.lanes()[rank].get();
  p.stream = stream_kind::collective;
}

void collective_operation::take(std::vector<rank_call> calls) {
  room_ = std::move(calls);
  needs_ = need_of(room_);
  calls_.clear();
  ends_.clear();
  for (auto& x : room_) {
    if (calls_.empty() || calls_.back()->rank != x.rank)
      ends_.push_back(0);
    calls_.push_back(&x);
    ends_.back() = calls_.size();
  }
  one_each_ = calls_.size() == ends_.size();
}

std::pair<std::size_t, std::size_t> collective_operation::places_of(const part& p) const noexcept {
  if (one_each_)
    return {p.index, 1};
  auto first = p.index == 0 ? 0 : ends_[p.index - 1];
  return {first, ends_[p.index] - first};
}

collective_operation::call_view collective_operation::calls_of(const part& p) const noexcept {
  auto [first, count] = places_of(p);
  return call_view{calls_}.subspan(first, count);
}

std::span<const std::shared_ptr<rank_request>>
collective_operation::requests_of(const part& p) const noexcept {
  if (requests_.empty())
    return {};
  auto [first, count] = places_of(p);
  return std::span{requests_}.subspan(first, count);
}

void collective_operation::add_all_uses() {
  expect_uses(2 * calls_.size());
  for (auto& p : parts()) {
    p.needs = calls_of(p).front();
    for (auto* call : calls_of(p))
      add_uses(*call, p.index, [this](use x) { add_use(std::move(x)); });
  }
}

caf::error collective_operation::check_call(const rank_call& call, std::span<const use> uses,
                                            std::uint64_t membership) const {
  auto refuse = [&](errc code, std::string detail) {
    auto why = describe(code, std::move(detail));
    why.rank = static_cast<int>(call.rank);
    why.device = world_->lanes()[call.rank]->state().ordinal();
    why.parts.clear();
    return make_error(std::move(why));
  };
  for (auto* other : calls_)
    if (other != nullptr) {
      if (auto text = difference(*other, call); !text.empty())
        return refuse(errc::collective_mismatch, std::move(text));
      if (!call.plan) // without a plan all others are equal to this one
        break;
    }
  if (membership != 0 && membership_ != 0 && membership != membership_)
    return refuse(errc::membership_changed, "other ranks' calls of it name membership " +
                                                std::to_string(membership_) + ", not " +
                                                std::to_string(membership));
  for (auto& u : call.is_message() ? uses : std::span<const use>{})
    for (auto& other : this->uses())
      if (other.memory == u.memory && other.begin < u.end && u.begin < other.end &&
          (other.writes || u.writes))
        return refuse(errc::invalid_argument,
                      "a message of a rank to itself needs two buffers that do not overlap");
  return {};
}

void collective_operation::add_call(const rank_call& call, std::span<use> uses,
                                    std::uint64_t membership,
                                    std::shared_ptr<rank_request> asked_by) {
  auto [place, part] = slot_of(call, absent_);
  parts()[part].needs = &call;
  if (admitted_at == 0) { // no other thread knows it yet
    requests_[place] = std::move(asked_by);
  } else {
    std::lock_guard lock{requests_mutex_};
    requests_[place] = std::move(asked_by);
  }
  if (membership != 0)
    membership_ = membership;
  calls_[place] = &call;
  --missing_;
  for (auto& u : uses)
    add_use(std::move(u));
}

std::string collective_operation::missing_ranks() const {
  std::string result;
  for (std::size_t i = 0; missing_ != 0 && i < calls_.size(); ++i)
    if (calls_[i] == nullptr)
      result += (result.empty() ? "rank " : ", ") +
                std::to_string(parts()[std::min(i, parts().size() - 1)].rank);
  return result;
}

room_maker collective_operation::maker_of_calls() const {
  auto result = room_maker::others;
  for (std::size_t i = 0; missing_ != 0 && i < calls_.size(); ++i)
    if (calls_[i] == nullptr) {
      auto rank = static_cast<std::size_t>(parts()[std::min(i, parts().size() - 1)].rank);
      result = std::max(result, world_->matching().maker_of(rank));
    }
  return result;
}

caf::error collective_operation::on_check() const {
  if (auto error = world_->check_view(*this, membership_, absent_); error)
    return error;
  // If ranks have left since the first call, missing calls no longer count, even if ranks are back.
  return missing_ != 0 ? world_->check_ranks_since(*this, made_for_) : caf::error{};
}

caf::error collective_operation::on_admit(queue_bound bound) {
  value.operation = number();
  if (!waits_for_world()) {
    run_on(world_->join(value));
    return {};
  }
  if (auto error = world_->enter_queue(*this, bound); error)
    return error;
  waiting_.store(true);
  return {};
}

void collective_operation::wait_no_more() noexcept {
  if (waiting_.load(std::memory_order_relaxed) && waiting_.exchange(false))
    world_->leave_queue();
}

void collective_operation::before_answer(const caf::error&) noexcept { wait_no_more(); }

void collective_operation::after_answer() noexcept {
  std::vector<std::shared_ptr<rank_request>> asked_by;
  {
    std::lock_guard lock{requests_mutex_};
    requests_told_ = true;
    asked_by = requests_done_ ? std::move(requests_) : requests_;
  }
  for (auto& x : asked_by) // a request that joins later sees the result itself
    if (x)
      x->end();
}

void collective_operation::on_settled() noexcept {
  std::vector<std::shared_ptr<rank_request>> gone;
  std::lock_guard lock{requests_mutex_};
  requests_done_ = true;
  if (requests_told_) // else `after_answer` still needs them
    gone.swap(requests_);
}

const void* collective_operation::waits_for() const {
  if (missing_ != 0)
    return this; // waits for the calls of the other ranks
  return waits_for_world() ? world_.get() : nullptr;
}

bool collective_operation::waits_for_world() const {
  return world_->waits() ||
         (needs_ == connect_scope::everything && world_->waits_for_connections());
}

void collective_operation::run_on(std::shared_ptr<communicator> target) {
  communicator_ = std::move(target);
  for (auto& p : parts())
    p.tenant = &communicator_->tenant(static_cast<std::size_t>(p.rank));
}

void collective_operation::on_submit() {
  wait_no_more();
  if (!world_->runs_on(communicator_.get())) {
    auto target = world_->join(value);
    // Its predecessors may still be in the streams of the former communicator.
    former_ = std::move(communicator_);
    run_on(std::move(target));
    for (auto& p : parts())
      if (former_)
        p.after = &former_->tenant(static_cast<std::size_t>(p.rank));
  }
  communicator_key_.store(communicator_.get());
  auto registered = [this](const symmetric_place& x) {
    return x.of->with(communicator_.get()) == symmetric_memory::state::registered;
  };
  may_be_symmetric_ = missing_ == 0 &&
                      is_symmetric(calls_, world_->size(), world_->limits().symmetric_bytes) &&
                      !communicator_->windows_closed() && registered(calls_.front()->send_place) &&
                      registered(calls_.front()->recv_place);
  if (may_be_symmetric_ && !former_)
    decide_at_once();
}

/// Decides without a vote if all lanes are idle: the operation comes next on each of them, and they
/// promise to issue it.
void collective_operation::decide_at_once() noexcept {
  auto all = parts();
  if (!std::all_of(all.begin(), all.end(), [](auto& p) { return p.on->comes_next(p); }))
    return;
  auto take_back = [](std::span<part> promised) {
    for (auto& p : promised) {
      p.promised = false;
      p.claimed.store(false);
      resume_frees(p);
      p.on->state().end_loan();
    }
  };
  for (auto& p : all) {
    p.awaited_by_all = p.on->defer_frees();
    p.promised = p.awaited_by_all && p.on->state().lend_if_live();
    if (!p.promised) {
      resume_frees(p);
      return take_back(all.first(p.index));
    }
    if (!claim_issue(p))
      return take_back(all.first(p.index + 1));
  }
  if (!communicator_->begin_symmetric(static_cast<std::uint32_t>(all.size())))
    return take_back(all);
  value.symmetric = true;
  decision_.store(way::symmetric, std::memory_order_release);
}

/// Counts one lane's vote. The last yes or the first no decides, once, and wakes all lanes that may
/// wait. A lane votes yes at most once, and may vote no afterwards.
void collective_operation::vote(bool yes) noexcept {
  if (decision_.load(std::memory_order_acquire) != way::open)
    return;
  if (!yes) {
    decide(way::plain);
    return;
  }
  const auto all = static_cast<std::uint32_t>(parts().size());
  if (agreed_.fetch_add(1, std::memory_order_acq_rel) + 1 < all)
    return;
  if (!communicator_->begin_symmetric(all)) {
    decide(way::plain);
    return;
  }
  value.symmetric = true;
  if (decide(way::symmetric))
    return;
  value.symmetric = false;
  for (std::size_t i = 0; i < all; ++i)
    communicator_->end_symmetric(i);
}

/// Sets the decision. Returns false if it was set before.
bool collective_operation::decide(way x) noexcept {
  auto none = way::open;
  if (!decision_.compare_exchange_strong(none, x, std::memory_order_acq_rel))
    return false;
  lane::wake(parts());
  return true;
}

/// Votes no: a kernel that passes this operation could block a symmetric one. The operation then
/// uses the plain call at once, before the work behind it.
bool collective_operation::lets_pass() noexcept {
  if (may_be_symmetric_)
    vote(false);
  return !may_be_symmetric_;
}

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
  if (!may_be_symmetric_)
    return issue(p, on, false);
  if (!p.promised) {
    p.awaited_by_all = on.defer_frees(); // the lane has reached it, and frees no memory from now on
    vote(on.starts_for_sure(p));
  }
  if (on.may_spin()) // the other lanes may be about to arrive
    spin_until([this] { return decision_.load(std::memory_order_acquire) != way::open; },
               voting_patience);
  return proceed(p, on);
}

caf::expected<issue_outcome> collective_operation::proceed(part& p, lane& on) {
  if (decision_.load(std::memory_order_acquire) == way::open) {
    if (communicator_->live())
      return issue_outcome::continues;
    vote(false); // no effect if the others have decided meanwhile and rely on this lane
  }
  auto outcome = issue(p, on, decision_.load(std::memory_order_acquire) == way::symmetric);
  resume_frees(p);
  return outcome;
}

caf::expected<issue_outcome> collective_operation::issue(part& p, lane& on, bool symmetric) {
  auto stream = on.stream(p);
  auto place = static_cast<std::size_t>(p.rank);
  if (symmetric) {
    p.certain = true;
    auto call = first_call_of(p).complete();
    call.symmetric = true;
    return issued(*this, p, *communicator_,
                  communicator_->call_for_sure(place, on, [&](backend_communicator& rank) {
                    return rank.enqueue({&call, 1}, stream);
                  }));
  }
  if (!communicator_->absent().empty())
    return issue_shrunk(p, on);
  auto error = communicator_->call(place, on, [&](backend_communicator& rank) {
    if (one_each_) {
      auto call = first_call_of(p).complete();
      return rank.enqueue({&call, 1}, stream);
    }
    std::vector<collective_call> calls;
    for (auto* x : calls_of(p))
      if (!x->empty())
        calls.push_back(x->complete());
    return rank.enqueue(calls, stream);
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

void collective_operation::show(place_lines& to) const noexcept {
  to.of.store(this, std::memory_order_relaxed);
  to.parts.store(parts().data(), std::memory_order_relaxed);
  to.uses.store(uses().data(), std::memory_order_relaxed);
  to.calls.store(calls_.data(), std::memory_order_relaxed);
  to.requests.store(requests_.data(), std::memory_order_relaxed);
}

void collective_operation::fetch_place(const place_lines& x, std::size_t ranks) noexcept {
  auto* of = x.of.load(std::memory_order_relaxed);
  auto* parts = x.parts.load(std::memory_order_relaxed);
  if (of == nullptr)
    return;
  for (std::size_t i = 0; i < ranks; ++i)
    prefetch_lines_to_change(parts + i, part::placed_bytes);
  operation::fetch_place(of);
  prefetch_members_to_change(of->value, of->former_);
  prefetch_to_change(x.calls.load(std::memory_order_relaxed));
  prefetch_to_change(x.requests.load(std::memory_order_relaxed));
  prefetch_lines_to_change(x.uses.load(std::memory_order_relaxed), ranks * sizeof(use));
}

void collective_operation::fetch_answer(const part& p) const noexcept {
  if (requests_.empty())
    return operation::fetch_answer(p);
  if (auto& x = requests_of(p).front()) {
    x->operation::fetch_answer(p);
    prefetch_to_change(&x->value);
  }
}

/// Checks for an asynchronous error, which ends the work too, but without success.
void collective_operation::on_part_done(part& p) noexcept {
  if (p.certain)
    communicator_->end_symmetric(static_cast<std::size_t>(p.rank));
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

void collective_operation::on_part_over(part& p) noexcept {
  if (p.promised)
    p.on->state().end_loan();
  resume_frees(p);
}

void collective_operation::resume_frees(part& p) noexcept {
  if (std::exchange(p.awaited_by_all, false))
    p.on->resume_frees();
}

/// Completes the requests of the part: they need not wait for the parts of other ranks.
void collective_operation::tell(part& p) noexcept {
  p.told.store(true, std::memory_order_release); // before the requester's next action
  bool known = true;
  for (auto& x : requests_of(p))
    known &= x->succeed(value);
  if (known)
    return;
  p.told.store(false, std::memory_order_release); // a request has completed with an error
  untold_.store(true, std::memory_order_relaxed);
}

bool collective_operation::answer_ahead() noexcept {
  if (has_successors() || failed() || is_placeholder())
    return false;
  if (!requests_.empty()) {
    if (untold_.load(std::memory_order_relaxed))
      return false;
    tell_all(true); // one flag to check instead of one per part
    return true;
  }
  tell_all(true); // as in `tell`
  if (!answer({}))
    tell_all(false);
  return true;
}

bool collective_operation::has_parts_elsewhere() const noexcept {
  return communicator_ && !world_->is_whole();
}

caf::error collective_operation::end_of_communicator(std::uint64_t epoch,
                                                     const caf::error& why) const {
  return loss(*this, parts().front(), epoch, why);
}

void collective_operation::on_lost_part(part& p, const caf::error& why) noexcept {
  communicator_->fail_unless_lost(loss(*this, p, communicator_->epoch(), why));
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
  communicator_->fail(stall(*this, communicator_->epoch()));
  return true;
}

void collective_operation::describe_to(flight_entry& x, const part& p) const noexcept {
  x.world = world_->tag();
  if (communicator_)
    x.epoch = communicator_->epoch();
  auto calls = calls_of(p);
  if (std::find(calls.begin(), calls.end(), nullptr) != calls.end())
    x.progress.state = flight_state::not_called;
  const rank_call* first = nullptr;
  bool same_type = true;
  for (auto* one : calls)
    if (one != nullptr) {
      x.count += one->plan ? sum_of(one->plan->send_counts) : one->call.count;
      first = first != nullptr ? first : one;
      same_type &= one->call.type == first->call.type;
    }
  if (x.count != 0 && same_type)
    x.type = static_cast<std::uint8_t>(first->call.type);
}

// -- one rank's request

void rank_request::begin(const char* verb, std::shared_ptr<collective_world> world, rank_call call,
                         rank_set absent, const request_options& options) {
  operation_of::begin(verb);
  world_ = std::move(world);
  call_ = std::move(call);
  membership_ = options.membership;
  absent_ = absent;
  add_uses(call_, slot_of(call_, absent_).part, [&](use x) {
    x.accepted = skipped_reads::of(options.retry_of);
    uses_[use_count_++] = std::move(x);
  });
  call_.send = call_.recv = {}; // the handles belong to the caller
}

std::span<const std::byte> rank_request::placing_lines() const noexcept {
  auto address = [](const auto& x) { return reinterpret_cast<const std::byte*>(&x); };
  return {address(static_cast<const rank_submission&>(*this)), address(call_.send_place)};
}

void rank_request::fetch_ahead() const noexcept {
  __builtin_prefetch(this);
  auto lines = placing_lines();
  prefetch_lines_to_change(lines.data(), lines.size());
  for (auto& u : uses())
    prefetch_lines_to_change(u.memory.get(), buffer::looked_at);
}

std::uint64_t rank_request::number() const noexcept {
  auto number = joint_number_.load(std::memory_order_relaxed);
  return number != 0 ? number : operation::number();
}

caf::expected<operation*> rank_request::joint() {
  // Check the membership first: a call for another membership is unrelated to the others' calls.
  if (auto error = world_->check_view(*this, membership_, absent_); error)
    return error;
  auto& line = world_->matching().line_of(call_);
  auto caller = rank_matching::caller_of(call_);
  auto* next = line.next_of(caller);
  for (; next != nullptr; next = line.next_of(caller)) {
    auto gone = next->why_ended();
    if (!gone)
      break;
    const auto made_in = next->made_in();
    line.take(caller, next->op); // consumes this rank's call of the ended operation
    if (membership_ == 0 || made_in == membership_) {
      counts_ = true;
      return gone;
    }
    world_->matching().passed_over(call_); // this call means a later membership
  }
  if (next != nullptr) {
    if (auto error = next->op->check_call(call_, uses(), membership_); error)
      return error;
    found_ = next->op;
  } else {
    if (auto error = check_line(line.ahead(caller), queue_bound::second); error)
      return error;
    found_ = made_ ? std::move(made_) : make_joint();
  }
  return found_.get();
}

/// Returns no error if one more call may wait in its call queue, where `ahead` calls wait already.
caf::error rank_request::check_line(std::size_t ahead, queue_bound bound) const {
  auto limit = limit_of(world_->limits().waiting_limit, bound);
  if (ahead < limit)
    return {};
  return make_error(
      describe_call(errc::overloaded,
                    std::to_string(limit) + " calls of this rank wait for calls of other ranks"));
}

const lane& rank_request::own_lane() const { return *world_->lanes()[call_.rank]; }

/// Checks for room in the rank's queues. Under the admission lock.
caf::error rank_request::check_room(queue_bound bound) const {
  auto& matching = world_->matching();
  auto& line = matching.line_of(call_);
  auto caller = rank_matching::caller_of(call_);
  auto ahead = line.ahead(caller);
  auto awaited = line.awaited(caller); // others' calls wait for these: they add nothing to a queue
  auto& queue = own_lane();
  if (awaited == 0) {
    if (auto error = check_line(ahead, bound); error)
      return error;
    if (!queue.accepts(bound))
      return make_error(
          describe_call(errc::overloaded, std::to_string(limit_of(queue.queue_limit(), bound)) +
                                              " operations already wait for the device"));
  }
  if (call_.is_message())
    return {};
  auto left = [](std::size_t limit, std::size_t there) { return limit - std::min(limit, there); };
  auto room = std::min(left(limit_of(world_->limits().waiting_limit, bound), ahead),
                       left(limit_of(queue.queue_limit(), bound), queue.queued()));
  matching.set_credit(call_.rank, room + awaited - 1);
  return {};
}

room_maker rank_request::who_makes_room(queue_bound bound) const {
  auto& matching = world_->matching();
  if (!check_line(matching.line_of(call_).ahead(rank_matching::caller_of(call_)), bound))
    return world_->owner()->gate().who_makes_room(own_lane());
  return matching.maker_of_missing(call_);
}

/// Waits for room in the rank's own queues. Calls that other threads add meanwhile are accepted.
caf::error rank_request::wait_for_room(room_policy room) {
  auto& matching = world_->matching();
  matching.note_caller(call_.rank);
  if (!call_.is_message() && matching.take_credit(call_.rank))
    return {};
  const auto how = choose_room(room);
  auto& gate = world_->owner()->gate();
  return find_room(
      how, deadline,
      [&]() -> caf::error {
        gate.drain();
        std::lock_guard lock{order_mutex()};
        return check_room(how.bound);
      },
      [&] {
        std::lock_guard lock{order_mutex()};
        return who_makes_room(how.bound);
      });
}

caf::expected<operation*> rank_request::alone(queue_bound bound) {
  if (auto error = world_->check_view(*this, membership_, absent_); error)
    return error;
  auto& line = world_->matching().line_of(call_);
  auto caller = rank_matching::caller_of(call_);
  auto awaited = std::min(before_, line.awaited(caller)); // other ranks have already made these
  if (auto error = check_line(line.ahead(caller) + before_ - awaited, bound); error)
    return error;
  auto* there = line.next_of(caller, before_);
  if (there != nullptr && there->op) // it adds nothing to a queue
    return there->op.get();
  made_ = make_joint();
  return made_.get();
}

void rank_request::count_refused(const caf::error& why) {
  if (counts_ || !world_->counts_calls_of(call_) || !counts_among_calls(why, membership_))
    return;
  counts_ = true;
  ended_ = world_->matching().count_refused(call_, why, world_->membership());
}

void rank_request::note_refused(const caf::error& why) {
  if (!fails_validation(why))
    mark_refused(uses(), why);
  count_refused(why);
  if (counts_)
    world_->matching().passed_over(call_);
}

void rank_request::end_refused(const caf::error& why) {
  if (auto op = std::move(ended_))
    op->fail(why);
  made_.reset();
  answer(why);
}

std::shared_ptr<collective_operation> rank_request::make_joint() {
  const bool of_all = !call_.is_message() && absent_.empty();
  if (auto ready = of_all ? world_->matching().spare_joint.take() : nullptr) {
    ready->begin(world_->self(), call_);
    return ready;
  }
  return std::make_shared<collective_operation>(world_->self(), call_, absent_);
}

failure rank_request::describe_call(errc code, std::string detail) const {
  auto why = describe(code, std::move(detail));
  why.operation = number();
  why.rank = static_cast<int>(call_.rank);
  why.device = world_->lanes()[call_.rank]->state().ordinal();
  return why;
}

caf::error rank_request::refuse_cycle() {
  return make_error(describe_call(errc::collective_mismatch,
                                  "a buffer of the call waits for calls of other ranks, "
                                  "which wait for this call: a deadlock"));
}

const void* rank_request::match_key() const noexcept {
  return call_.is_message() ? nullptr : world_.get();
}

std::shared_ptr<operation> rank_request::whole(std::span<rank_submission* const> all) {
  std::uint64_t seen = 0;
  if (all.size() != world_->size() - absent_.size() || call_.plan ||
      world_->matching().waits_for_calls())
    return nullptr;
  for (auto* x : all) {
    if (x->match_key() != world_.get())
      return nullptr;
    auto& other = static_cast<const rank_request&>(*x);
    auto bit = std::uint64_t{1} << other.call_.rank;
    if ((seen & bit) != 0 || other.membership_ != membership_ || other.absent_ != absent_ ||
        other.answered() || !alike(call_, other.call_))
      return nullptr;
    seen |= bit;
  }
  auto result = make_joint();
  if (world_->check_view(*result, membership_, absent_))
    return nullptr;
  return result;
}

void rank_request::become_part_of(std::shared_ptr<collective_operation> joint,
                                  std::shared_ptr<operation> self) {
  joint_ = std::move(joint);
  counts_ = true;
  joint_number_.store(joint_->number(), std::memory_order_relaxed);
  joint_->add_call(call_, std::span{uses_}.first(use_count_), membership_,
                   std::static_pointer_cast<rank_request>(std::move(self)));
  use_count_ = 0;
}

void rank_request::join_whole(std::span<rank_submission* const> all,
                              const std::shared_ptr<operation>& joint) {
  auto op = std::static_pointer_cast<collective_operation>(joint);
  for (auto* x : all) {
    auto& request = static_cast<rank_request&>(*x);
    request.become_part_of(op, request.take_self());
  }
  world_->matching().collectives().take_of_all();
}

bool rank_request::join(std::shared_ptr<operation> self) {
  world_->matching().line_of(call_).take(rank_matching::caller_of(call_), found_);
  become_part_of(std::move(found_), std::move(self));
  return !joint_->answered(); // if it has completed, only `placed` can complete this request
}

bool rank_request::succeed(const collective_done& value_of_all) noexcept {
  // A concurrent completion with an error does not touch `value`.
  value = value_of_all;
  return answer({});
}

void rank_request::start(room_policy room) {
  if (auto error = wait_for_room(room); error) {
    {
      std::lock_guard lock{order_mutex()};
      note_refused(error);
    }
    return end_refused(error);
  }
  admitted_at = clock::now().time_since_epoch().count();
  auto& gate = world_->owner()->gate();
  auto self = std::static_pointer_cast<rank_request>(shared_from_this());
  gate.enqueue(self, *this);
  prefetch_to_change(&order_mutex());
  // The thread of the last rank places the calls of all ranks, at once.
  auto& matching = world_->matching();
  if (call_.is_message()) {
    gate.drain();
  } else if (matching.handed_in(call_.rank, absent_, placing_lines())) {
    collective_operation::fetch_place(matching.joint_lines, world_->size());
    gate.drain();
  } else {
    gate.drain_soon();
  }
  watch();
}

admission::submission rank_request::begin_together(std::size_t before) {
  world_->matching().note_caller(call_.rank);
  admitted_at = clock::now().time_since_epoch().count();
  before_ = before;
  return {std::static_pointer_cast<operation>(shared_from_this()), this};
}

void rank_request::watch() {
  auto& keeper = world_->owner()->keeper();
  keeper.add(*this);
  if (answered())
    keeper.remove(*this);
}

void rank_request::placed(const caf::error& why) {
  auto& runtime = *world_->owner();
  if (!counts_ && !call_.is_message())
    world_->matching().refused(call_.rank);
  if (why || !joint_) {
    found_.reset();
    if (why)
      end_refused(why);
    runtime.keeper().remove(*this);
    return;
  }
  if (answered()) // before it had its position
    joint_->take_back(code_of(error()) == errc::cancelled ? early_end::cancelled
                                                          : early_end::expired,
                      [this] { return error(); });
  if (joint_->answered())
    end();
}

void rank_request::end() noexcept {
  if (!answered()) {
    if (!joint_->error())
      value = joint_->value; // its part had nothing to do
    answer(joint_->error());
  }
  auto& owner = *world_->owner();
  owner.keeper().remove(*this);
  if (!joint_->on_lanes())
    owner.gate().go_on_soon(); // other operations need not wait for it
}

void rank_request::end_early(early_end how) noexcept {
  auto why = early_failure(how);
  end_early(how, why.code, why.detail);
}

/// Ends the request early. While nothing of its operation is issued, the calls of all ranks end
/// with it: one rank cannot end alone.
void rank_request::end_early(early_end how, errc code, const std::string& detail) noexcept {
  world_->owner()->gate().drain();
  std::shared_ptr<collective_operation> joint;
  std::string missing;
  {
    std::lock_guard lock{order_mutex()};
    joint = joint_;
    missing = joint ? joint->missing_ranks() : std::string{};
  }
  auto why = [&](const char* outcome) {
    auto cause = describe_call(code, detail);
    cause.detail += missing.empty() ? outcome : "; not called by " + missing;
    return make_error(std::move(cause));
  };
  if (!joint)
    answer(why(""));
  else if (!joint->take_back(how, [&] { return why("; it was not issued, and does not run"); }))
    answer(why("; it was issued, and runs on"));
  else
    answer(joint->error());
}

void rank_request::end_beside(early_end how, const caf::error& why) noexcept {
  if (!answered())
    end_early(how, errc::cancelled,
              (how == early_end::cancelled ? "its exchange ended: "
                                           : "another message of its exchange failed: ") +
                  troupe::describe(why));
}

exchange_request::exchange_request(std::shared_ptr<runtime> owner,
                                   std::vector<std::shared_ptr<rank_request>> requests)
    : operation_of("exchange", 0), owner_(std::move(owner)), requests_(std::move(requests)),
      left_(requests_.size()) {}

void exchange_request::start(room_policy room) {
  auto self = std::static_pointer_cast<exchange_request>(shared_from_this());
  std::map<std::pair<std::int32_t, collective_kind>, std::size_t> lines;
  std::vector<admission::submission> all;
  all.reserve(requests_.size());
  for (auto& x : requests_) {
    x->on_answer([self, request = x.get()] { self->on_answer_of(*request); });
    all.push_back(x->begin_together(lines[{x->peer(), x->what()}]++));
  }
  const auto how = choose_room(room);
  auto why = find_room(
      how, requests_.front()->deadline,
      [&] { return owner_->gate().place_together(all, how.bound); },
      [&] {
        std::lock_guard lock{order_mutex()};
        auto result = room_maker::others;
        for (auto& x : requests_)
          result = std::max(result, x->who_makes_room(how.bound));
        return result;
      });
  if (why) {
    {
      std::lock_guard lock{order_mutex()};
      for (auto& x : requests_)
        x->note_refused(why);
    }
    answer(why);
    for (auto& x : requests_)
      x->end_refused(why);
    return;
  }
  for (auto& x : requests_)
    x->watch();
  auto& keeper = owner_->keeper();
  on_answer([owner = owner_, weak = std::weak_ptr{self}] {
    if (auto x = weak.lock())
      owner->keeper().remove(*x);
  });
  keeper.add(*this);
  if (answered())
    keeper.remove(*this);
}

void exchange_request::on_answer_of(const rank_request& x) noexcept {
  if (!x.error()) {
    if (left_.fetch_sub(1) == 1) {
      value = requests_.back()->value;
      answer({});
    }
    return;
  }
  if (!answer(x.error()))
    return;
  // The completing thread may hold the admission lock: end the others on the timekeeper's thread.
  auto self = std::static_pointer_cast<exchange_request>(shared_from_this());
  const auto how = early_end::expired; // the ranges that they would have written are skipped
  owner_->keeper().call_at(clock::now(), [self, how, why = x.error()] { self->end_all(how, why); });
}

void exchange_request::end_all(early_end how, const caf::error& why) noexcept {
  for (auto& x : requests_)
    x->end_beside(how, why);
}

void exchange_request::end_early(early_end how) noexcept {
  auto why = make_error(early_failure(how));
  answer(why);
  end_all(how, why);
}

// -- connect

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
                                     std::chrono::nanoseconds limit)
    : connect_operation("connect", std::move(target), what, patience, limit) {}

connect_operation::connect_operation(const char* verb, std::shared_ptr<communicator> target,
                                     connect_scope what, std::chrono::nanoseconds patience,
                                     std::chrono::nanoseconds limit)
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
  communicator_->fail_unless_lost(loss(*this, p, communicator_->epoch(), why));
}

bool connect_operation::on_stall() noexcept {
  // The stall limit applies until all lanes have arrived, `limit_` applies afterwards.
  auto entered_at = entered_at_.load();
  if (arrived_.load() == parts().size() &&
      (entered_at == 0 || now_in_nanoseconds() - entered_at < limit_.count()))
    return false;
  auto none = turn::to_come;
  if (may_give_up() && turn_.compare_exchange_strong(none, turn::given_up)) {
    fail(stall(*this, communicator_->epoch()));
    lane::wake(parts());
    return true;
  }
  communicator_->fail(stall(*this, communicator_->epoch()));
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
    : connect_operation("register", std::move(target), connect_scope::everything, patience, limit),
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

// -- memory on all ranks

allocate_all_operation::allocate_all_operation(const std::vector<std::shared_ptr<lane>>& lanes,
                                               rank_set absent, dtype type, std::size_t count,
                                               bool zeroed,
                                               std::shared_ptr<symmetric_memory> symmetric)
    : operation_of("allocate", lanes.size() - absent.size()), type_(type), count_(count),
      zeroed_(zeroed), symmetric_(std::move(symmetric)) {
  value.refs.resize(lanes.size());
  auto next = parts().begin();
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    if (absent.contains(i))
      continue;
    auto& p = *next++;
    p.on = lanes[i].get();
    p.rank = static_cast<int>(i);
    p.stream = stream_kind::memory; // not behind kernels
  }
  of_elements(count, type);
}

caf::expected<std::shared_ptr<buffer>> allocate_all_operation::allocate(const part& p, lane& on,
                                                                        std::size_t bytes) {
  // An empty buffer still has an address of its own.
  auto size = std::max<std::size_t>(bytes, 1);
  auto memory = symmetric_ ? on.device().allocate_symmetric(size)
                           : on.device().allocate(size, on.stream(p.stream));
  if (!memory)
    return memory.error();
  if (symmetric_)
    symmetric_->add(rank_of(p), on.shared_state(), *memory);
  return on.state().make_buffer(*memory, bytes, {}, symmetric_);
}

caf::expected<issue_outcome> allocate_all_operation::issue(part& p, lane& on) {
  auto bytes = count_ * size_of(type_);
  auto memory = allocate(p, on, bytes);
  if (!memory)
    return memory.error();
  auto* address = (*memory)->address();
  value.refs[rank_of(p)] = any_gpu_ref{std::move(*memory), type_, 0, count_};
  if (zeroed_ && bytes != 0) {
    std::byte zero{};
    if (auto error = on.device().fill(address, {&zero, 1}, bytes, on.stream(p.stream)); error)
      return error;
  }
  return issue_outcome::enqueued;
}

} // namespace troupe::detail
