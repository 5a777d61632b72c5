/// One rank of a world, as a program with a thread or an actor per rank sees it.
#pragma once

#include <troupe/world.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace troupe {

/// Calls of one rank with only its own handles, as in MPI programs. The k-th collective calls of
/// all ranks form one operation, whichever threads or actors make them. The k-th `send` from one
/// rank to another matches the k-th `recv` there, each as a call of its own or in an `exchange`. A
/// call is ordered among all work on its buffers when it is made. It completes when its rank's part
/// of the operation is done. Operations of the whole world (`world`) in between do not count.
///
/// While the world is without some of its ranks (`loss_policy::shrink`), the calls of the present
/// ranks match each other (`request_options::allow_shrunk`); calls of absent ranks do not count. If
/// an operation fails before a rank has made its call, the rank's next call gets the error, unless
/// that call names a later membership (`request_options::membership`). So each rank's first calls
/// that name a new membership match each other.
///
/// The messages of the same names (troupe/collective.hpp) document the effects and shapes.
/// @errors those of the messages, and errc::collective_mismatch: the ranks' calls do not match, or
///         each would wait for another; all of them get this error, which names the rank. If a call
///         ends before its operation runs, it ends for all ranks, including ranks that make their
///         call later. Reasons are cancel, a deadline, a device reset, and refusals
///         (errc::overloaded, stale_ref, indeterminate, skipped, buffer_acquired, unavailable). So
///         a program that ignores a result never combines data of different steps. A call does not
///         count if it is invalid by itself (errc::invalid_argument, shape_mismatch, not_supported,
///         a handle without memory), if it names another membership (errc::membership_changed), or
///         if its rank is absent. If one message of an exchange is refused for such a reason, none
///         of them counts.
/// @thread any; the caller determines the order of one rank's calls
class world_rank {
public:
  int index() const noexcept { return static_cast<int>(rank_); }
  /// Returns the number of ranks.
  std::size_t size() const noexcept { return world_.size(); }
  /// Returns the world to which the rank belongs.
  const world& whole() const noexcept { return world_; }
  /// Returns the rank's device. If the rank is out of range or its device is in another process,
  /// the result is a placeholder: `ordinal` is -1, `phase` is `device_phase::failed`, and each
  /// request fails with errc::invalid_argument, which names the rank.
  device where() const { return world_.device_of(rank_); }
  world_status status() const { return world_.status(); }

  /// Runs in place.
  pending<collective_done> all_reduce(const any_gpu_ref& buffer, reduce_op op = reduce_op::sum,
                                      request_options options = {}) const;
  pending<collective_done> all_reduce(const any_gpu_ref& buffer, request_options options) const {
    return all_reduce(buffer, reduce_op::sum, options);
  }
  pending<collective_done> all_reduce(const any_gpu_ref& send, const any_gpu_ref& recv,
                                      reduce_op op = reduce_op::sum,
                                      request_options options = {}) const;
  pending<collective_done> all_reduce(const any_gpu_ref& send, const any_gpu_ref& recv,
                                      request_options options) const {
    return all_reduce(send, recv, reduce_op::sum, options);
  }

  /// Runs in place: the root's `buffer` gets the result.
  pending<collective_done> reduce(const any_gpu_ref& buffer, int root,
                                  reduce_op op = reduce_op::sum,
                                  request_options options = {}) const {
    return reduce(buffer, index() == root ? buffer : any_gpu_ref{}, root, op, options);
  }
  pending<collective_done> reduce(const any_gpu_ref& buffer, int root,
                                  request_options options) const {
    return reduce(buffer, root, reduce_op::sum, options);
  }
  /// @shape  recv: empty on ranks other than the root
  pending<collective_done> reduce(const any_gpu_ref& send, const any_gpu_ref& recv, int root,
                                  reduce_op op = reduce_op::sum,
                                  request_options options = {}) const;
  pending<collective_done> reduce(const any_gpu_ref& send, const any_gpu_ref& recv, int root,
                                  request_options options) const {
    return reduce(send, recv, root, reduce_op::sum, options);
  }

  /// Runs in place: copies the root's `buffer` to those of the other ranks.
  pending<collective_done> broadcast(const any_gpu_ref& buffer, int root,
                                     request_options options = {}) const;
  /// @shape  send: empty on ranks other than the root
  pending<collective_done> broadcast(const any_gpu_ref& send, const any_gpu_ref& recv, int root,
                                     request_options options = {}) const;

  pending<collective_done> all_gather(const any_gpu_ref& send, const any_gpu_ref& recv,
                                      request_options options = {}) const;
  /// Runs in place.
  pending<collective_done> all_gather(const any_gpu_ref& recv, request_options options = {}) const;

  pending<collective_done> reduce_scatter(const any_gpu_ref& send, const any_gpu_ref& recv,
                                          reduce_op op = reduce_op::sum,
                                          request_options options = {}) const;
  pending<collective_done> reduce_scatter(const any_gpu_ref& send, const any_gpu_ref& recv,
                                          request_options options) const {
    return reduce_scatter(send, recv, reduce_op::sum, options);
  }
  /// Runs in place.
  pending<collective_done> reduce_scatter(const any_gpu_ref& send, reduce_op op = reduce_op::sum,
                                          request_options options = {}) const;
  pending<collective_done> reduce_scatter(const any_gpu_ref& send, request_options options) const {
    return reduce_scatter(send, reduce_op::sum, options);
  }

  pending<collective_done> all_to_all(const any_gpu_ref& send, const any_gpu_ref& recv,
                                      request_options options = {}) const;

  /// @shape  one count per rank; the parts are contiguous, in rank order
  pending<collective_done> all_to_all_v(const any_gpu_ref& send,
                                        std::vector<std::uint64_t> send_counts,
                                        const any_gpu_ref& recv,
                                        std::vector<std::uint64_t> recv_counts,
                                        request_options options = {}) const;

  /// @shape  recv: empty on ranks other than the root
  pending<collective_done> gather(const any_gpu_ref& send, const any_gpu_ref& recv, int root,
                                  request_options options = {}) const;
  /// @shape  send: empty on ranks other than the root
  pending<collective_done> scatter(const any_gpu_ref& send, const any_gpu_ref& recv, int root,
                                   request_options options = {}) const;

  pending<collective_done> send(const any_gpu_ref& buffer, int to,
                                request_options options = {}) const;
  pending<collective_done> recv(const any_gpu_ref& buffer, int from,
                                request_options options = {}) const;

  /// Runs several messages as one operation, so it does not matter which rank sends first.
  pending<collective_done> exchange(std::vector<message_end> sends, std::vector<message_end> recvs,
                                    request_options options = {}) const;

  pending<collective_done> barrier(request_options options = {}) const;

  /// Runs any of the above, in the form of `rank_local`; also with a factor, for
  /// reduce_op::premul_sum.
  pending<collective_done> run(const collective& call, request_options options = {}) const;

private:
  friend class world;
  world_rank(world w, std::size_t rank);

  pending<collective_done> call(collective_kind what, const any_gpu_ref& send,
                                const any_gpu_ref& recv, reduce_op op, int peer,
                                const request_options& options) const;

  world world_;
  std::shared_ptr<detail::world_core> core_; // with its own reference count
  std::size_t rank_;
};

} // namespace troupe
