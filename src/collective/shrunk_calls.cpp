#include "collective/shrunk_calls.hpp"

#include "collective/communicator.hpp"
#include "foundation/collective_rules.hpp"

#include <utility>

namespace troupe::detail {

namespace {

std::byte* at(const void* x, std::size_t offset) noexcept {
  return static_cast<std::byte*>(const_cast<void*>(x)) + offset;
}

/// Moves the rank's part of an in-place gather to its rank in the communicator.
void gather_in_place(collective_call& call, std::size_t rank, std::size_t there, shrunk_calls& to) {
  if (call.recv == nullptr || rank == there || !uses_own_block(call, rank))
    return;
  const auto part = call.count * size_of(call.type);
  auto* target = at(call.recv, there * part);
  to.moves.push_back({target, call.send, part});
  call.send = target;
}

/// Adds part `i` of `send`, which is for rank `i`, for each rank that is present.
void scatter_to(const collective_call& call, std::size_t rank, const communicator& on,
                exchange_plan& plan) {
  for (auto i : on.members()) {
    const bool stays = i == rank && uses_own_block(call, rank);
    plan.send_counts.push_back(stays ? 0 : call.count);
    plan.send_offsets.push_back(i * call.count);
  }
}

exchange_plan plan_of_scatter(const collective_call& call, std::size_t rank,
                              const communicator& on) {
  const auto n = on.members().size();
  const auto root = static_cast<std::size_t>(call.peer);
  exchange_plan result;
  result.recv_counts.resize(n);
  result.recv_offsets.resize(n);
  result.recv_counts[on.rank_of(root)] = call.count;
  if (rank == root) {
    scatter_to(call, rank, on, result);
    result.recv_counts[on.rank_of(root)] = result.send_counts[on.rank_of(root)];
  } else {
    result.send_counts.resize(n);
    result.send_offsets.resize(n);
  }
  return result;
}

exchange_plan plan_of_all_to_all(const collective_call& call, const communicator& on) {
  exchange_plan result;
  for (auto i : on.members()) {
    result.send_counts.push_back(call.count);
    result.send_offsets.push_back(i * call.count);
    result.recv_offsets.push_back(result.recv_counts.size() * call.count);
    result.recv_counts.push_back(call.count);
  }
  return result;
}

exchange_plan plan_of_exchange(const exchange_plan& whole, const communicator& on) {
  exchange_plan result;
  std::size_t end = 0;
  for (auto i : on.members()) {
    result.send_counts.push_back(whole.send_counts[i]);
    result.send_offsets.push_back(whole.send_offsets[i]);
    result.recv_counts.push_back(whole.recv_counts[i]);
    result.recv_offsets.push_back(end);
    end += whole.recv_counts[i];
  }
  return result;
}

} // namespace

void add_shrunk(const rank_call& of, const communicator& on, shrunk_calls& to) {
  auto call = of.complete();
  const auto there = on.rank_of(of.rank);
  auto as_exchange = [&](exchange_plan plan) {
    call.what = collective_kind::all_to_all_v;
    call.plan = &to.plans.emplace_back(std::move(plan));
    to.calls.push_back(call);
  };
  switch (call.what) {
  case collective_kind::reduce_scatter: {
    // Part i is for rank i, even if a rank before it is absent.
    auto* const recv = call.recv;
    const auto* const send = call.send;
    call.what = collective_kind::reduce;
    for (auto i : on.members()) {
      call.peer = static_cast<int>(on.rank_of(i));
      call.send = at(send, i * call.count * size_of(call.type));
      call.recv = i == of.rank ? recv : nullptr;
      to.calls.push_back(call);
    }
    return;
  }
  case collective_kind::scatter:
    return as_exchange(plan_of_scatter(call, of.rank, on));
  case collective_kind::all_to_all:
    return as_exchange(plan_of_all_to_all(call, on));
  case collective_kind::all_to_all_v:
    return as_exchange(plan_of_exchange(*of.plan, on));
  default:
    gather_in_place(call, of.rank, there, to);
    if (has_peer(call.what))
      call.peer = static_cast<int>(on.rank_of(static_cast<std::size_t>(call.peer)));
    to.calls.push_back(call);
  }
}

} // namespace troupe::detail
