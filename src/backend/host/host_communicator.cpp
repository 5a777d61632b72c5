#include "host_communicator.hpp"

#include "host_stream.hpp"

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

caf::error host_communicator::connect(stream_view) noexcept { return group_->error(); }

caf::error host_communicator::enqueue(std::span<const collective_call> calls,
                                      stream_view stream) noexcept {
  const auto& [what, send, recv, count, type, op, peer, factor, plan] = calls.front();
  const auto invalid = [this](const char* why) {
    failure f;
    f.code = errc::invalid_argument;
    f.verb = "all_reduce";
    f.rank = rank_;
    f.detail = why;
    return make_error(std::move(f));
  };
  if (!stream.native)
    return invalid("no stream");
  if (count > 0 && (!send || !recv))
    return invalid("a null buffer");
  if (size_of(type) == 0)
    return invalid("no such dtype");
  if (auto err = group_->announce())
    return err;
  auto err = static_cast<host_stream*>(stream.native)
                 ->enqueue(all_reduce_command{group_, rank_, next_, {send, recv, count, type, op}});
  if (err)
    group_->retract();
  else
    ++next_;
  return err;
}

caf::error host_communicator::asynchronous_error() noexcept { return group_->error(); }

} // namespace troupe::detail
