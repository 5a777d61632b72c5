#include "backend/host/host_communicator.hpp"

#include "backend/host/host_stream.hpp"
#include "foundation/collective_rules.hpp"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace troupe::detail {

host_communicator::host_communicator(std::shared_ptr<host_transport> transport, int rank) noexcept
    : transport_(std::move(transport)), rank_(rank) {}

host_communicator::~host_communicator() { transport_->end(rank_left(rank_)); }

caf::error host_communicator::connect(stream_view, connect_scope) noexcept {
  return transport_->error();
}

caf::error host_communicator::enqueue(std::span<const collective_call> calls, stream_view stream,
                                      step_position) noexcept {
  const auto invalid = [this](const char* why, collective_kind what) {
    return make_error({.code = errc::invalid_argument,
                       .detail = why,
                       .verb = std::string{to_string(what)},
                       .rank = rank_});
  };
  if (calls.empty())
    return invalid("no calls", {});
  if (!stream.native)
    return invalid("no stream", calls.front().what);
  for (const auto& x : calls)
    if (const auto* why = fault_of(x))
      return invalid(why, x.what);
  std::vector<host_call> made(calls.begin(), calls.end());
  if (auto err = transport_->announce(rank_, made))
    return err;
  auto err = static_cast<host_stream*>(stream.native)
                 ->enqueue(collective_command{transport_, rank_, next_, std::move(made)});
  if (err)
    transport_->retract();
  else
    ++next_;
  return err;
}

const char* host_communicator::fault_of(const collective_call& x) const noexcept {
  using enum collective_kind;
  const auto ranks = static_cast<std::size_t>(transport_->size());
  const auto& rules = rules_of(x.what);
  if (!is_known(x.what))
    return "unknown kind of collective";
  if (x.what == barrier)
    return nullptr;
  const auto element_bytes = size_of(x.type);
  if (element_bytes == 0 || is_complex(x.type))
    return "unknown dtype";
  if (has_peer(x.what) && (x.peer < 0 || x.peer >= transport_->size()))
    return "the peer or root is out of range";
  if (reduces(x.what) && x.op > reduce_op::premul_sum)
    return "unknown reduce operation";
  if (reduces(x.what) && x.op == reduce_op::premul_sum && !x.factor)
    return "no factor";
  if (x.what == all_to_all_v) {
    if (!x.plan)
      return "no plan";
    const auto& [send_counts, send_offsets, recv_counts, recv_offsets] = *x.plan;
    if (send_counts.size() != ranks || send_offsets.size() != ranks ||
        recv_counts.size() != ranks || recv_offsets.size() != ranks)
      return "the plan does not have one entry per rank";
    const auto none = [](const auto& counts) {
      return std::ranges::all_of(counts, [](std::size_t count) { return count == 0; });
    };
    return (none(send_counts) || x.send) && (none(recv_counts) || x.recv) ? nullptr
                                                                          : "a buffer is null";
  }
  if (x.count > SIZE_MAX / element_bytes / ranks)
    return "the size in bytes overflows";
  const auto root = x.peer == rank_;
  if (x.count > 0 && ((rules.send.held(root) && !x.send) || (rules.recv.held(root) && !x.recv)))
    return "a buffer is null";
  return nullptr;
}

caf::error host_communicator::asynchronous_error() noexcept { return transport_->error(); }

} // namespace troupe::detail
