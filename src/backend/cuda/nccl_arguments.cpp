#include "backend/cuda/nccl_arguments.hpp"

#include "backend/cuda/communicator_failure.hpp"
#include "backend/cuda/nccl_types.hpp"
#include "foundation/collective_rules.hpp"

#include <nccl.h>

#include <cstdint>
#include <limits>
#include <string>

namespace troupe::detail {

namespace {

constexpr std::size_t no_limit = std::numeric_limits<std::size_t>::max();

bool is_float8(dtype type) noexcept {
  return type == dtype::float8_e4m3 || type == dtype::float8_e5m2;
}

bool is_operation(reduce_op op) noexcept {
  return op == reduce_op::premul_sum || to_nccl(op) != ncclNumOps;
}

bool is_aligned(const void* memory, dtype type) noexcept {
  return reinterpret_cast<std::uintptr_t>(memory) % size_of(type) == 0;
}

} // namespace

caf::error call_validator::validate(std::span<const collective_call> calls,
                                    stream_view stream) const {
  if (calls.empty())
    return communicator_failure(errc::invalid_argument, "the group has no calls", &where_);
  if (stream.native == nullptr)
    return communicator_failure(errc::invalid_argument, "no stream", &where_);
  for (std::size_t i = 0; i < calls.size(); ++i)
    if (const char* why = complaint(calls[i])) {
      const auto which = calls.size() == 1 ? "" : "call " + std::to_string(i) + ": ";
      return communicator_failure(errc::invalid_argument, which + why, &where_);
    }
  if (!has_own_pairs(calls))
    return communicator_failure(
        errc::invalid_argument,
        "a send of a rank to itself needs its recv in the same group, with the same size", &where_);
  auto too_new = [this](const collective_call& call) {
    return !float8_ && reduces(call.what) && is_float8(call.type);
  };
  if (std::ranges::any_of(calls, too_new))
    return communicator_failure(
        errc::not_supported,
        "reductions of float8 need devices of compute capability 9.0 or higher", &where_);
  return {};
}

const char* call_validator::complaint(const collective_call& call) const noexcept {
  if (!is_known(call.what))
    return "unknown kind of collective";
  if (call.what == collective_kind::barrier)
    return nullptr;
  if (!is_dtype(call.type) || is_complex(call.type))
    return "unknown dtype";
  if (has_peer(call.what) && (call.peer < 0 || call.peer >= size_))
    return "the peer or root is out of range";
  if (reduces(call.what) && !is_operation(call.op))
    return "unknown reduce operation";
  if (reduces(call.what) && call.op == reduce_op::premul_sum && call.factor == nullptr)
    return "no factor";
  const bool root = call.peer == where_.rank;
  const bool sends = rules_of(call.what).send.held(root);
  const bool receives = rules_of(call.what).recv.held(root);
  if ((sends && !is_aligned(call.send, call.type)) ||
      (receives && !is_aligned(call.recv, call.type)))
    return "the memory is not aligned to its dtype";
  if (call.what == collective_kind::all_to_all_v)
    return call.plan == nullptr ? "no plan" : complaint(*call.plan, call);
  if (call.count > no_limit / size_of(call.type) / static_cast<std::size_t>(size_))
    return "the size in bytes overflows";
  if (call.count > 0 && ((sends && call.send == nullptr) || (receives && call.recv == nullptr)))
    return "a buffer is null";
  return nullptr;
}

const char* call_validator::complaint(const exchange_plan& plan,
                                      const collective_call& call) const noexcept {
  const auto n = static_cast<std::size_t>(size_);
  for (const auto* x :
       {&plan.send_counts, &plan.send_offsets, &plan.recv_counts, &plan.recv_offsets})
    if (x->size() != n)
      return "the plan does not have one entry per rank";
  const auto limit = no_limit / size_of(call.type);
  auto fits = [limit](std::size_t offset, std::size_t count) {
    return count <= limit && offset <= limit - count;
  };
  for (std::size_t i = 0; i < n; ++i)
    if (!fits(plan.send_offsets[i], plan.send_counts[i]) ||
        !fits(plan.recv_offsets[i], plan.recv_counts[i]))
      return "the size in bytes overflows";
  const auto rank = static_cast<std::size_t>(where_.rank);
  if (plan.send_counts[rank] != plan.recv_counts[rank])
    return "in the plan, a rank sends another count to itself than it receives from itself";
  if ((call.send == nullptr && any_count(plan.send_counts)) ||
      (call.recv == nullptr && any_count(plan.recv_counts)))
    return "a buffer is null";
  return nullptr;
}

bool call_validator::has_own_pairs(std::span<const collective_call> calls) const noexcept {
  auto next = [&](collective_kind what, auto from) {
    return std::find_if(from, calls.end(), [&](const collective_call& x) {
      return x.what == what && x.peer == where_.rank && x.count > 0;
    });
  };
  auto send = next(collective_kind::send, calls.begin());
  auto recv = next(collective_kind::recv, calls.begin());
  while (send != calls.end() && recv != calls.end() && bytes_of(*send) == bytes_of(*recv)) {
    send = next(collective_kind::send, send + 1);
    recv = next(collective_kind::recv, recv + 1);
  }
  return send == calls.end() && recv == calls.end();
}

pair_traffic traffic_between(const collective_call& call, int rank, int peer) noexcept {
  const auto& send = rules_of(call.what).send;
  const auto& recv = rules_of(call.what).recv;
  const auto bytes = bytes_of(call);
  const auto q = static_cast<std::size_t>(peer);
  const bool root = call.peer == rank;
  const bool peer_is_root = call.peer == peer;
  pair_traffic result;
  result.send_bytes = send.held(root) && recv.held(peer_is_root) ? bytes : 0;
  result.recv_bytes = recv.held(root) && send.held(peer_is_root) ? bytes : 0;
  std::size_t send_offset = send.block_of(q) * bytes;
  std::size_t recv_offset = recv.block_of(q) * bytes;
  if (call.what == collective_kind::all_to_all_v) {
    const auto unit = size_of(call.type);
    result.send_bytes = call.plan->send_counts[q] * unit;
    result.recv_bytes = call.plan->recv_counts[q] * unit;
    send_offset = call.plan->send_offsets[q] * unit;
    recv_offset = call.plan->recv_offsets[q] * unit;
  }
  if (result.send_bytes > 0)
    result.send = static_cast<const std::byte*>(call.send) + send_offset;
  if (result.recv_bytes > 0)
    result.recv = static_cast<std::byte*>(call.recv) + recv_offset;
  return peer == rank && result.send == result.recv ? pair_traffic{} : result;
}

} // namespace troupe::detail
