/// `collective_operation` up to the lanes: its calls, their checks, admission and requests.
#include "collective/collective_operation.hpp"

#include "collective/collective_world.hpp"
#include "collective/communicator.hpp"
#include "collective/rank_matching.hpp"
#include "collective/rank_request.hpp"
#include "foundation/collective_rules.hpp"
#include "lane/lane.hpp" // for state()

#include <algorithm>
#include <numeric>

namespace troupe::detail {

namespace {

std::uint64_t sum_of(const std::vector<std::size_t>& counts) noexcept {
  return std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
}

/// Returns what the communicator must be connected for before `calls`, sorted by rank, are made.
connect_scope need_of(std::span<const rank_call> calls) noexcept {
  for (std::size_t i = 0; i < calls.size(); ++i)
    if (rules_of(calls[i].call.what).pairwise || // or a group: several calls of one rank
        (i != 0 && calls[i].rank == calls[i - 1].rank))
      return connect_scope::everything;
  return connect_scope::collectives;
}

/// Returns the number of different ranks in `calls`, which are sorted by rank.
std::size_t count_ranks(std::span<const rank_call> calls) {
  std::size_t result = 0;
  for (std::size_t i = 0; i < calls.size(); ++i)
    result += i == 0 || calls[i].rank != calls[i - 1].rank;
  return result;
}

std::size_t part_count(const rank_call& any, std::size_t ranks) noexcept {
  if (!any.is_message())
    return ranks;
  return static_cast<std::size_t>(any.call.peer) == any.rank ? 1 : 2;
}

const char* joint_verb(collective_kind x) noexcept {
  return is_message(x) ? "send_recv" : to_string(x).data();
}

} // namespace

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

collective_operation::collective_operation(const char* verb,
                                           std::shared_ptr<collective_world> world,
                                           std::vector<rank_call> calls, std::uint64_t membership,
                                           std::span<const use> uses)
    : operation_of(verb, calls.size()), world_(std::move(world)), membership_(membership),
      absent_() {
  take(std::move(calls));
  expect_uses(uses.size());
  for (auto& p : parts()) {
    place_part(p, calls_of(p).front()->rank, *world_);
    p.needs = calls_of(p).front();
  }
  for (auto& u : uses)
    add_use(use{u});
}

collective_operation::collective_operation(locked lock, std::shared_ptr<collective_world> world,
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
  of_ranks(lock, std::move(world), any_call);
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

void collective_operation::begin(locked lock, std::shared_ptr<collective_world> world,
                                 const rank_call& any_call) {
  operation_of::begin(joint_verb(any_call.call.what));
  draw_number();
  of_ranks(lock, std::move(world), any_call);
}

/// Initializes an operation that ranks request, before other threads may read the parts.
void collective_operation::of_ranks(locked lock, std::shared_ptr<collective_world> world,
                                    const rank_call& any_call) {
  world_ = std::move(world);
  first_membership_ = world_->membership(lock);
  absence_changes_ = world_->absence_changes(lock);
  needed_connections_ = need_of({&any_call, 1});
  way_ = world_->way_of(any_call);
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
  needed_connections_ = need_of(room_);
  const bool all_direct = std::all_of(room_.begin(), room_.end(), [this](auto& x) {
    return world_->way_of(x) == collective_way::direct;
  });
  way_ = all_direct ? collective_way::direct : collective_way::nccl;
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

std::pair<std::size_t, std::size_t> collective_operation::slots_of(const part& p) const noexcept {
  if (one_each_)
    return {p.index, 1};
  auto first = p.index == 0 ? 0 : ends_[p.index - 1];
  return {first, ends_[p.index] - first};
}

collective_operation::call_view collective_operation::calls_of(const part& p) const noexcept {
  auto [first, count] = slots_of(p);
  return call_view{calls_}.subspan(first, count);
}

std::span<const std::shared_ptr<rank_request>>
collective_operation::requests_of(const part& p) const noexcept {
  if (requests_.empty())
    return {};
  auto [first, count] = slots_of(p);
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

caf::error collective_operation::check_call(locked, const rank_call& call,
                                            std::span<const use> uses,
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

void collective_operation::add_call(locked, const rank_call& call, std::span<use> uses,
                                    std::uint64_t membership,
                                    std::shared_ptr<rank_request> asked_by) {
  auto [index, part] = slot_of(call, absent_);
  parts()[part].needs = &call;
  if (admitted_at == 0) { // no other thread knows it yet
    requests_[index] = std::move(asked_by);
  } else {
    std::lock_guard lock{requests_mutex_};
    requests_[index] = std::move(asked_by);
  }
  if (membership != 0)
    membership_ = membership;
  calls_[index] = &call;
  --missing_;
  for (auto& u : uses)
    add_use(std::move(u));
}

std::string collective_operation::missing_ranks(locked) const {
  std::string result;
  for (std::size_t i = 0; missing_ != 0 && i < calls_.size(); ++i)
    if (calls_[i] == nullptr)
      result += (result.empty() ? "rank " : ", ") +
                std::to_string(parts()[std::min(i, parts().size() - 1)].rank);
  return result;
}

room_maker collective_operation::maker_of_calls(locked) const {
  auto result = room_maker::others;
  for (std::size_t i = 0; missing_ != 0 && i < calls_.size(); ++i)
    if (calls_[i] == nullptr) {
      auto rank = static_cast<std::size_t>(parts()[std::min(i, parts().size() - 1)].rank);
      result = std::max(result, world_->matching().maker_of(rank));
    }
  return result;
}

caf::error collective_operation::on_check(locked lock) const {
  if (way_ == collective_way::direct)
    for (auto& u : uses())
      if (u.memory->has_no_peers())
        return make_error(describe(errc::not_supported,
                                   "direct collectives do not reach memory that one worker process "
                                   "has alone: open the world with collectives_policy::nccl"));
  if (auto error = world_->check_view(lock, *this, membership_, absent_); error)
    return error;
  // If ranks have left since the first call, missing calls no longer count, even if ranks are back.
  return missing_ != 0 ? world_->check_ranks_since(lock, *this, absence_changes_) : caf::error{};
}

caf::error collective_operation::on_admit(locked lock, queue_bound bound) {
  value.operation = number();
  if (!waits_for_world(lock)) {
    run_on(world_->join(lock, way_, value));
    return {};
  }
  if (auto error = world_->enter_queue(lock, *this, bound); error)
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

const void* collective_operation::waits_for(locked lock) const {
  if (missing_ != 0)
    return this; // waits for the calls of the other ranks
  return waits_for_world(lock) ? world_.get() : nullptr;
}

bool collective_operation::waits_for_world(locked lock) const {
  return world_->waits(lock, way_) || (needed_connections_ == connect_scope::everything &&
                                       world_->waits_for_connections(lock, way_));
}

void collective_operation::run_on(std::shared_ptr<communicator> target, step_position where) {
  communicator_ = std::move(target);
  in_step_ = where;
  for (auto& p : parts())
    p.tenant = &communicator_->tenant(static_cast<std::size_t>(p.rank));
}

void collective_operation::on_submit(locked lock) {
  wait_no_more();
  if (!world_->runs_on(lock, way_, communicator_.get())) {
    auto target = world_->join(lock, way_, value);
    // Its predecessors may still be in the streams of the former communicator.
    former_ = std::move(communicator_);
    run_on(std::move(target));
    for (auto& p : parts())
      if (former_)
        p.after = &former_->tenant(static_cast<std::size_t>(p.rank));
  }
  communicator_key_.store(communicator_.get());
}

void collective_operation::describe_to(flight_entry& x, const part& p) const noexcept {
  x.world = world_->tag();
  if (communicator_) {
    x.epoch = communicator_->epoch();
    x.way = static_cast<std::uint8_t>(communicator_->way());
  }
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

} // namespace troupe::detail
