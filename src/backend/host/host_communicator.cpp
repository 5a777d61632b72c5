#include "host_communicator.hpp"

#include "host_stream.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace troupe::detail {

host_communicator::host_communicator(std::shared_ptr<host_group> group, int rank) noexcept
    : group_(std::move(group)), rank_(rank) {}

host_communicator::~host_communicator() {
  failure f;
  f.code = errc::nccl_error;
  f.rank = rank_;
  f.detail = "a rank left the communicator";
  group_->end(make_error(std::move(f)));
}

caf::error host_communicator::connect(stream_view, connect_scope) noexcept {
  return group_->error();
}

caf::error host_communicator::enqueue(std::span<const collective_call> calls,
                                      stream_view stream) noexcept {
  const auto invalid = [this](const char* why, collective_kind what) {
    failure f;
    f.code = errc::invalid_argument;
    f.verb = to_string(what);
    f.rank = rank_;
    f.detail = why;
    return make_error(std::move(f));
  };
  if (calls.empty())
    return invalid("no calls", {});
  if (!stream.native)
    return invalid("no stream", calls.front().what);
  for (const auto& x : calls)
    if (const auto* why = fault_of(x))
      return invalid(why, x.what);
  if (auto err = group_->announce())
    return err;
  auto err = static_cast<host_stream*>(stream.native)
                 ->enqueue(collective_command{group_, rank_, next_, {calls.begin(), calls.end()}});
  if (err)
    group_->retract();
  else
    ++next_;
  return err;
}

const char* host_communicator::fault_of(const collective_call& x) const noexcept {
  using enum collective_kind;
  const auto ranks = static_cast<std::size_t>(group_->size());
  if (x.what > barrier)
    return "no such collective";
  if (x.what == barrier)
    return nullptr;
  const auto element_bytes = size_of(x.type);
  if (element_bytes == 0)
    return "no such dtype";
  if ((has_root(x.what) || is_message(x.what)) && (x.peer < 0 || x.peer >= group_->size()))
    return "no such rank";
  if (reduces(x.what) && x.op > reduce_op::premul_sum)
    return "no such reduce_op";
  if (reduces(x.what) && x.op == reduce_op::premul_sum && !x.factor)
    return "no factor";
  if (x.what == all_to_all_v) {
    if (!x.plan)
      return "no plan";
    const auto& [send_counts, send_offsets, recv_counts, recv_offsets] = *x.plan;
    if (send_counts.size() != ranks || send_offsets.size() != ranks ||
        recv_counts.size() != ranks || recv_offsets.size() != ranks)
      return "a plan that has not one entry per rank";
    const auto none = [](const auto& counts) {
      return std::ranges::all_of(counts, [](std::size_t count) { return count == 0; });
    };
    return (none(send_counts) || x.send) && (none(recv_counts) || x.recv) ? nullptr
                                                                          : "a null buffer";
  }
  if (x.count > SIZE_MAX / element_bytes / ranks)
    return "more elements than there can be";
  const auto root = x.peer == rank_;
  const auto sends = x.what != recv && (root || (x.what != broadcast && x.what != scatter));
  const auto receives = x.what != send && (root || (x.what != reduce && x.what != gather));
  if (x.count > 0 && ((sends && !x.send) || (receives && !x.recv)))
    return "a null buffer";
  return nullptr;
}

caf::error host_communicator::asynchronous_error() noexcept { return group_->error(); }

} // namespace troupe::detail
