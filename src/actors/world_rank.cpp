#include "actors/answer.hpp"
#include "actors/supervised.hpp"
#include "world/world_core.hpp"
#include <troupe/world_rank.hpp>

#include <algorithm>
#include <climits>
#include <utility>

namespace troupe {

namespace {

std::shared_ptr<detail::world_core> apart(const std::shared_ptr<detail::world_core>& x) {
  return x ? detail::counted_apart(x) : nullptr; // null: of an empty `world`
}

} // namespace

/// A rank that is out of range stays out of range as an `int`.
world_rank::world_rank(world w, std::size_t rank)
    : world_(std::move(w)), core_(apart(detail::world_access::core_of(world_))),
      rank_(std::min<std::size_t>(rank, INT_MAX)) {}

pending<collective_done> world_rank::call(collective_kind what, const any_gpu_ref& send,
                                          const any_gpu_ref& recv, reduce_op op, int peer,
                                          const request_options& options) const {
  if (!core_)
    return detail::refused_by_empty_world(to_string(what).data());
  return answer(core_->run(index(), {what, send, recv, op, peer}, options, core_));
}

pending<collective_done> world_rank::run(const collective& what, request_options options) const {
  if (!core_)
    return detail::refused_by_empty_world(to_string(what.kind).data());
  return answer(core_->run(index(), detail::collective_view{what}, options, core_));
}

pending<collective_done> world_rank::all_reduce(const any_gpu_ref& buffer, reduce_op op,
                                                request_options options) const {
  return call(collective_kind::all_reduce, buffer, {}, op, -1, options);
}

pending<collective_done> world_rank::all_reduce(const any_gpu_ref& send, const any_gpu_ref& recv,
                                                reduce_op op, request_options options) const {
  return call(collective_kind::all_reduce, send, recv, op, -1, options);
}

pending<collective_done> world_rank::reduce(const any_gpu_ref& send, const any_gpu_ref& recv,
                                            int root, reduce_op op, request_options options) const {
  return call(collective_kind::reduce, send, recv, op, root, options);
}

pending<collective_done> world_rank::broadcast(const any_gpu_ref& buffer, int root,
                                               request_options options) const {
  return broadcast(index() == root ? buffer : any_gpu_ref{}, buffer, root, options);
}

pending<collective_done> world_rank::broadcast(const any_gpu_ref& send, const any_gpu_ref& recv,
                                               int root, request_options options) const {
  return call(collective_kind::broadcast, send, recv, reduce_op::sum, root, options);
}

pending<collective_done> world_rank::all_gather(const any_gpu_ref& send, const any_gpu_ref& recv,
                                                request_options options) const {
  return call(collective_kind::all_gather, send, recv, reduce_op::sum, -1, options);
}

pending<collective_done> world_rank::all_gather(const any_gpu_ref& recv,
                                                request_options options) const {
  return call(collective_kind::all_gather, {}, recv, reduce_op::sum, -1, options);
}

pending<collective_done> world_rank::reduce_scatter(const any_gpu_ref& send,
                                                    const any_gpu_ref& recv, reduce_op op,
                                                    request_options options) const {
  return call(collective_kind::reduce_scatter, send, recv, op, -1, options);
}

pending<collective_done> world_rank::reduce_scatter(const any_gpu_ref& send, reduce_op op,
                                                    request_options options) const {
  return call(collective_kind::reduce_scatter, send, {}, op, -1, options);
}

pending<collective_done> world_rank::all_to_all(const any_gpu_ref& send, const any_gpu_ref& recv,
                                                request_options options) const {
  return call(collective_kind::all_to_all, send, recv, reduce_op::sum, -1, options);
}

pending<collective_done> world_rank::all_to_all_v(const any_gpu_ref& send,
                                                  std::vector<std::uint64_t> send_counts,
                                                  const any_gpu_ref& recv,
                                                  std::vector<std::uint64_t> recv_counts,
                                                  request_options options) const {
  collective what;
  what.kind = collective_kind::all_to_all_v;
  if (send) // else it is missing, as with the other verbs
    what.send = {send};
  if (recv)
    what.recv = {recv};
  what.counts = {std::move(send_counts), std::move(recv_counts)};
  return run(what, options);
}

pending<collective_done> world_rank::gather(const any_gpu_ref& send, const any_gpu_ref& recv,
                                            int root, request_options options) const {
  return call(collective_kind::gather, send, recv, reduce_op::sum, root, options);
}

pending<collective_done> world_rank::scatter(const any_gpu_ref& send, const any_gpu_ref& recv,
                                             int root, request_options options) const {
  return call(collective_kind::scatter, send, recv, reduce_op::sum, root, options);
}

pending<collective_done> world_rank::send(const any_gpu_ref& buffer, int to,
                                          request_options options) const {
  return call(collective_kind::send, buffer, {}, reduce_op::sum, to, options);
}

pending<collective_done> world_rank::recv(const any_gpu_ref& buffer, int from,
                                          request_options options) const {
  return call(collective_kind::recv, {}, buffer, reduce_op::sum, from, options);
}

pending<collective_done> world_rank::exchange(std::vector<message_end> sends,
                                              std::vector<message_end> recvs,
                                              request_options options) const {
  if (!core_)
    return detail::refused_by_empty_world("exchange");
  const troupe::exchange what{index(), std::move(sends), std::move(recvs), options};
  return answer(core_->run(what, core_));
}

pending<collective_done> world_rank::barrier(request_options options) const {
  return call(collective_kind::barrier, {}, {}, reduce_op::sum, -1, options);
}

} // namespace troupe
