#include "backend/host/host_group.hpp"

#include "foundation/collective_rules.hpp"
#include "foundation/reduction.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>

namespace troupe::detail {

namespace {

/// @units bytes up to which one rank does the work of all, which costs less than another meeting
constexpr auto one_worker_bytes = std::size_t{16} << 10;

const std::byte* at(const void* memory, std::size_t offset) noexcept {
  return static_cast<const std::byte*>(memory) + offset;
}

std::byte* at(void* memory, std::size_t offset) noexcept {
  return static_cast<std::byte*>(memory) + offset;
}

void copy_bytes(void* target, const void* source, std::size_t size_bytes) noexcept {
  if (size_bytes > 0 && target != source)
    std::memcpy(target, source, size_bytes);
}

/// Returns whether two ranks make the same call.
bool match(const host_call& x, const host_call& y) noexcept {
  if (x.what != y.what)
    return false;
  if (x.what == collective_kind::barrier)
    return true;
  return x.type == y.type && (x.count == y.count || x.what == collective_kind::all_to_all_v) &&
         (x.op == y.op || !reduces(x.what)) && (x.peer == y.peer || !has_root(x.what));
}

std::string describe(const host_call& x) {
  std::string result{to_string(x.what)};
  if (x.what == collective_kind::barrier)
    return result;
  result += " of ";
  if (x.what != collective_kind::all_to_all_v)
    result += std::to_string(x.count) + ' ';
  result += to_string(x.type);
  if (reduces(x.what)) {
    result += ", ";
    result += to_string(x.op);
  }
  if (has_root(x.what))
    result += ", root " + std::to_string(x.peer);
  return result;
}

caf::error mismatch(const host_call& call, int rank, std::string detail) {
  return make_error({.code = errc::collective_mismatch,
                     .detail = std::move(detail),
                     .verb = std::string{to_string(call.what)},
                     .rank = rank});
}

} // namespace

host_group::host_group(int size)
    : turns_(static_cast<std::size_t>(size)), parts_(static_cast<std::size_t>(size)),
      left_(static_cast<std::size_t>(size)) {}

caf::error host_group::announce(int, std::span<const host_call>) noexcept {
  std::lock_guard guard{mutex_};
  if (ended_)
    return why_;
  ++announced_;
  return {};
}

void host_group::run(int rank, std::uint64_t sequence, std::span<const host_call> calls) noexcept {
  lock guard{mutex_};
  ++inside_;
  if (wait_for_turn(guard, rank, sequence) && take_turn(guard, rank, calls))
    end_turn(rank);
  if (ended_)
    changed_.wait(guard, [this] { return working_ == 0; });
  --inside_;
  if (--announced_ == 0 || ended_)
    changed_.notify_all();
}

void host_group::end(caf::error why) noexcept {
  std::lock_guard guard{mutex_};
  end_locked(std::move(why));
}

void host_group::wait_quiet() noexcept {
  lock guard{mutex_};
  changed_.wait(guard, [this] { return inside_ == 0; });
}

void host_group::leave(int rank) noexcept {
  std::lock_guard guard{mutex_};
  left_[static_cast<std::size_t>(rank)] = true;
  first_left_ = rank;
  const auto awaited = [&](const auto& x) {
    const auto& [from, to] = x.first;
    return !x.second.empty() && (from == rank || to == rank);
  };
  if (arrived_ > 0 || std::ranges::any_of(messages_, awaited))
    end_locked(rank_left(rank));
}

// Calls of a rank may come from several streams.
bool host_group::wait_for_turn(lock& guard, int rank, std::uint64_t sequence) noexcept {
  const auto& turn = turns_[static_cast<std::size_t>(rank)];
  ++out_of_turn_;
  changed_.wait(guard, [&] { return ended_ || turn == sequence; });
  --out_of_turn_;
  return !ended_;
}

void host_group::end_turn(int rank) noexcept {
  ++turns_[static_cast<std::size_t>(rank)];
  if (out_of_turn_ > 0)
    changed_.notify_all();
}

bool host_group::take_turn(lock& guard, int rank, std::span<const host_call> calls) noexcept {
  auto open = static_cast<std::size_t>(
      std::ranges::count_if(calls, [](const host_call& x) { return is_message(x.what); }));
  if (open > 0)
    for (const auto& x : calls)
      if (is_message(x.what) && !offer(guard, {&x, rank, &open}))
        return false;
  for (const auto& x : calls)
    if (!is_message(x.what) && !take_part(guard, rank, x))
      return false;
  changed_.wait(guard, [&] { return ended_ || open == 0; });
  return !ended_;
}

bool host_group::offer(lock& guard, const message& mine) noexcept {
  const auto sends = mine.call->what == collective_kind::send;
  const auto peer = mine.call->peer;
  if (left_[static_cast<std::size_t>(peer)]) {
    end_locked(rank_left(peer));
    return false;
  }
  auto& waiting = messages_[sends ? std::pair{mine.rank, peer} : std::pair{peer, mine.rank}];
  if (waiting.empty() || waiting.front().call->what == mine.call->what) {
    waiting.push_back(mine);
    return true;
  }
  // The second rank does the copy: the first one may already be in a collective.
  const auto other = waiting.front();
  waiting.pop_front();
  const auto& from = sends ? mine : other;
  const auto& to = sends ? other : mine;
  const auto size_bytes = from.call->size_bytes();
  if (size_bytes != to.call->size_bytes()) {
    end_locked(mismatch(*to.call, to.rank,
                        "rank " + std::to_string(from.rank) + " sent " +
                            std::to_string(size_bytes) + " bytes, this one takes " +
                            std::to_string(to.call->size_bytes())));
    return false;
  }
  if (!work(guard, [&] { copy_bytes(to.call->recv, from.call->send, size_bytes); }))
    return false;
  --*mine.open;
  if (--*other.open == 0)
    changed_.notify_all();
  return true;
}

bool host_group::take_part(lock& guard, int rank, const host_call& call) noexcept {
  if (first_left_ >= 0) {
    end_locked(rank_left(first_left_));
    return false;
  }
  parts_[static_cast<std::size_t>(rank)] = &call;
  const auto begin = [&] {
    if (auto err = compare_parts())
      return end_locked(std::move(err));
    done_by_one_ = is_small();
    if (done_by_one_)
      work(guard, [this] { do_all(); });
  };
  if (!meet(guard, begin) || done_by_one_)
    return !ended_;
  if (!work(guard, [&] { do_share(rank); }) || !meet(guard, [] {}))
    return false;
  return call.what != collective_kind::all_reduce ||
         (work(guard, [&] { gather_slices(rank); }) && meet(guard, [] {}));
}

template <class F> bool host_group::meet(lock& guard, F last) noexcept {
  const auto phase = phase_;
  if (++arrived_ == size()) {
    last();
    if (ended_)
      return false;
    arrived_ = 0;
    ++phase_;
    guard.unlock(); // so that woken threads find it free
    changed_.notify_all();
    guard.lock();
    return !ended_;
  }
  changed_.wait(guard, [&] { return ended_ || phase_ != phase; });
  return !ended_;
}

template <class F> bool host_group::work(lock& guard, F f) noexcept {
  ++working_;
  guard.unlock();
  f();
  guard.lock();
  if (--working_ == 0 && ended_)
    changed_.notify_all();
  return !ended_;
}

caf::error host_group::compare_parts() const {
  const auto& first = *parts_.front();
  for (std::size_t r = 0; r < parts_.size(); ++r) {
    const auto rank = static_cast<int>(r);
    const auto& mine = *parts_[r];
    if (!match(first, mine))
      return mismatch(mine, rank,
                      "rank 0 called " + describe(first) + ", this one " + describe(mine));
  }
  return first.what == collective_kind::all_to_all_v ? compare_plans() : caf::error{};
}

caf::error host_group::compare_plans() const {
  for (std::size_t r = 0; r < parts_.size(); ++r) {
    const auto& mine = *parts_[r];
    for (std::size_t q = 0; q < parts_.size(); ++q) {
      const auto sent = parts_[q]->plan.send_counts[r];
      if (const auto wanted = mine.plan.recv_counts[q]; sent != wanted)
        return mismatch(mine, static_cast<int>(r),
                        "rank " + std::to_string(q) + " sends " + std::to_string(sent) +
                            " elements, this one takes " + std::to_string(wanted));
    }
  }
  return {};
}

bool host_group::is_small() const noexcept {
  const auto& first = *parts_.front();
  if (first.what == collective_kind::all_to_all_v)
    return std::ranges::all_of(parts_, [&](const host_call* x) {
      const auto& counts = x->plan.recv_counts;
      return std::accumulate(counts.begin(), counts.end(), std::size_t{0}) <=
             one_worker_bytes / size_of(first.type);
    });
  return first.what == collective_kind::barrier ||
         first.size_bytes() <=
             one_worker_bytes / (rules_of(first.what).per_rank() ? parts_.size() : 1);
}

void host_group::do_all() const {
  const auto& first = *parts_.front();
  if (first.what == collective_kind::all_reduce) {
    std::vector<void*> outputs;
    outputs.reserve(parts_.size());
    for (const auto* x : parts_)
      outputs.push_back(x->recv);
    return reduce_elements(0, first.count, outputs);
  }
  for (int rank = 0; rank < size(); ++rank)
    do_share(rank);
}

void host_group::do_share(int rank) const {
  const auto r = static_cast<std::size_t>(rank);
  const auto& mine = *parts_[r];
  const auto size_bytes = mine.size_bytes();
  const auto root = [&]() -> const host_call& {
    return *parts_[static_cast<std::size_t>(mine.peer)];
  };
  switch (mine.what) {
  case collective_kind::all_reduce:
    return reduce_slice(rank, mine.recv);
  case collective_kind::reduce:
    return reduce_slice(rank, root().recv);
  case collective_kind::reduce_scatter:
    return reduce_elements(r * mine.count, mine.count, {&mine.recv, 1});
  case collective_kind::broadcast:
    return copy_bytes(mine.recv, root().send, size_bytes);
  case collective_kind::scatter:
    return copy_bytes(mine.recv, at(root().send, r * size_bytes), size_bytes);
  case collective_kind::gather:
    return copy_bytes(at(root().recv, r * size_bytes), mine.send, size_bytes);
  case collective_kind::all_gather:
    for (std::size_t q = 0; q < parts_.size(); ++q)
      copy_bytes(at(mine.recv, q * size_bytes), parts_[q]->send, size_bytes);
    return;
  case collective_kind::all_to_all:
    for (std::size_t q = 0; q < parts_.size(); ++q)
      copy_bytes(at(mine.recv, q * size_bytes), at(parts_[q]->send, r * size_bytes), size_bytes);
    return;
  case collective_kind::all_to_all_v: {
    const auto element_bytes = size_of(mine.type);
    for (std::size_t q = 0; q < parts_.size(); ++q)
      if (const auto count = mine.plan.recv_counts[q]; count > 0) // else there may be no memory
        copy_bytes(at(mine.recv, mine.plan.recv_offsets[q] * element_bytes),
                   at(parts_[q]->send, parts_[q]->plan.send_offsets[r] * element_bytes),
                   count * element_bytes);
    return;
  }
  default:
    return;
  }
}

/// Reduces `count` elements of each rank's `send`, beginning with element `from`.
void host_group::reduce_elements(std::size_t from, std::size_t count,
                                 std::span<void* const> outputs) const {
  const auto& first = *parts_.front();
  const auto offset = from * size_of(first.type);
  std::vector<const void*> inputs;
  std::vector<const void*> factors;
  inputs.reserve(parts_.size());
  for (const auto* x : parts_)
    inputs.push_back(at(x->send, offset));
  if (first.op == reduce_op::premul_sum)
    for (const auto* x : parts_)
      factors.push_back(x->factor.data());
  detail::reduce(first.type, first.op, inputs, outputs, count, factors);
}

void host_group::reduce_slice(int rank, void* output) const {
  const auto [begin, end] = slice_of(rank);
  void* const target = at(output, begin * size_of(parts_.front()->type));
  reduce_elements(begin, end - begin, {&target, 1});
}

host_group::range host_group::slice_of(int rank) const noexcept {
  constexpr std::size_t line = 64; // elements, so that no two ranks write into one cache line
  const auto count = parts_.front()->count;
  const auto ranks = parts_.size();
  const auto length = (count + ranks * line - 1) / (ranks * line) * line;
  const auto begin = std::min(count, static_cast<std::size_t>(rank) * length);
  return {begin, std::min(count, begin + length)};
}

void host_group::gather_slices(int rank) const noexcept {
  const auto element_bytes = size_of(parts_.front()->type);
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank)
      continue;
    const auto [begin, end] = slice_of(peer);
    const auto offset = begin * element_bytes;
    copy_bytes(at(parts_[static_cast<std::size_t>(rank)]->recv, offset),
               at(parts_[static_cast<std::size_t>(peer)]->recv, offset),
               (end - begin) * element_bytes);
  }
}

} // namespace troupe::detail
