#include "backend/host/host_transport.hpp"

#include <cstring>
#include <utility>

namespace troupe::detail {

caf::error rank_left(int rank) {
  return make_error(
      {.code = errc::nccl_error, .detail = "a rank left the communicator", .rank = rank});
}

host_call::host_call(const collective_call& x)
    : what(x.what), type(x.type), op(x.op), peer(x.peer), send(x.send), recv(x.recv),
      count(x.count) {
  if (x.factor && reduces(what) && op == reduce_op::premul_sum)
    std::memcpy(factor.data(), x.factor, size_of(type));
  if (x.plan && what == collective_kind::all_to_all_v)
    plan = *x.plan;
}

void host_transport::retract() noexcept {
  lock guard{mutex_};
  if (--announced_ == 0)
    changed_.notify_all();
}

caf::error host_transport::error() const noexcept {
  if (!ended_.load(std::memory_order_acquire))
    return {};
  std::lock_guard guard{mutex_};
  return why_;
}

void host_transport::wait_idle() noexcept {
  lock guard{mutex_};
  changed_.wait(guard, [this] { return announced_ == 0; });
}

void host_transport::end_locked(caf::error why) noexcept {
  if (ended_)
    return;
  why_ = std::move(why);
  ended_.store(true, std::memory_order_release);
  changed_.notify_all();
}

} // namespace troupe::detail
