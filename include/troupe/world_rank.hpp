/// One rank of a world, as a program with a thread or an actor per rank sees it.
#pragma once

#include <troupe/world.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace troupe {

/// Calls of one rank, with its own handles alone, as MPI programs make them. The k-th collective
/// call of each rank make one operation, whatever threads or actors make them; for messages, the
/// k-th `send` from one rank to another and the k-th `recv` there, each alone or in an `exchange`.
/// A call has its place among all work on its buffers when it is made, and its answer when its
/// rank's part of the operation is done. Whole operations of the world (`world`) may come between;
/// they do not count.
///
/// While the world is without some of its ranks (`loss_policy::shrink`), the calls of those that
/// are there belong together (`request_options::allow_shrunk`); those of the others do not
/// count. A rank that has not yet made its call of an operation that failed has the error in its
/// next call, unless this names a later membership (`request_options::membership`): so each rank's
/// first calls that name one belong together.
///
/// What the verbs do, and their shapes, stands at the messages of the same names
/// (troupe/collective.hpp).
/// @errors as those, and errc::collective_mismatch: the ranks' calls do not go together, or each
///         would wait for another; all of them have this answer, which names the rank. What ends
///         one call before its operation runs ends it for all ranks, also for those that come to
///         it later: cancel, a deadline, a device's reset, and whatever else refuses it
///         (errc::overloaded, stale_ref, indeterminate, skipped, buffer_acquired, unavailable). So
///         a program that does not look at an answer never adds up what is of different steps. A
///         call that is wrong by itself (errc::invalid_argument, shape_mismatch, not_supported, a
///         handle that has no memory), or names another membership
///         (errc::membership_changed), or is of a rank that the world is without, does not count;
///         of an exchange of which one message is refused so, none does.
/// @thread any; the order of one rank's calls is its caller's
class world_rank {
public:
  int index() const noexcept { return static_cast<int>(rank_); }
  /// Number of ranks.
  std::size_t size() const noexcept { return world_.size(); }
  /// The world that it is a rank of.
  const world& whole() const noexcept { return world_; }
  /// Its device. A rank that is out of range, or whose device is in another process, has none: then
  /// `ordinal` is -1, `phase` is `device_phase::failed`, and each request fails with
  /// errc::invalid_argument, which names the rank.
  device where() const { return world_.device_of(rank_); }
  world_status status() const { return world_.status(); }

  /// In place.
  pending<collective_done> all_reduce(const any_gpu_ref& buffer, reduce_op op = reduce_op::sum,
                                      request_options options = {}) const;
  pending<collective_done> all_reduce(const any_gpu_ref& send, const any_gpu_ref& recv,
                                      reduce_op op = reduce_op::sum,
                                      request_options options = {}) const;

  /// `recv`: empty on other ranks than the root.
  pending<collective_done> reduce(const any_gpu_ref& send, const any_gpu_ref& recv, int root,
                                  reduce_op op = reduce_op::sum,
                                  request_options options = {}) const;

  /// In place: from the root's `buffer` to the others'.
  pending<collective_done> broadcast(const any_gpu_ref& buffer, int root,
                                     request_options options = {}) const;
  /// `send`: empty on other ranks than the root.
  pending<collective_done> broadcast(const any_gpu_ref& send, const any_gpu_ref& recv, int root,
                                     request_options options = {}) const;

  pending<collective_done> all_gather(const any_gpu_ref& send, const any_gpu_ref& recv,
                                      request_options options = {}) const;
  /// In place.
  pending<collective_done> all_gather(const any_gpu_ref& recv, request_options options = {}) const;

  pending<collective_done> reduce_scatter(const any_gpu_ref& send, const any_gpu_ref& recv,
                                          reduce_op op = reduce_op::sum,
                                          request_options options = {}) const;
  /// In place.
  pending<collective_done> reduce_scatter(const any_gpu_ref& send, reduce_op op = reduce_op::sum,
                                          request_options options = {}) const;

  pending<collective_done> all_to_all(const any_gpu_ref& send, const any_gpu_ref& recv,
                                      request_options options = {}) const;

  /// @shape  one count per rank; the parts lie one behind the other, in rank order
  pending<collective_done> all_to_all_v(const any_gpu_ref& send,
                                        std::vector<std::uint64_t> send_counts,
                                        const any_gpu_ref& recv,
                                        std::vector<std::uint64_t> recv_counts,
                                        request_options options = {}) const;

  /// `recv`: empty on other ranks than the root.
  pending<collective_done> gather(const any_gpu_ref& send, const any_gpu_ref& recv, int root,
                                  request_options options = {}) const;
  /// `send`: empty on other ranks than the root.
  pending<collective_done> scatter(const any_gpu_ref& send, const any_gpu_ref& recv, int root,
                                   request_options options = {}) const;

  pending<collective_done> send(const any_gpu_ref& buffer, int to,
                                request_options options = {}) const;
  pending<collective_done> recv(const any_gpu_ref& buffer, int from,
                                request_options options = {}) const;

  /// Several messages as one: who sends first does not matter.
  pending<collective_done> exchange(std::vector<message_end> sends, std::vector<message_end> recvs,
                                    request_options options = {}) const;

  pending<collective_done> barrier(request_options options = {}) const;

  /// Any of the above, in the form that `rank_local` has; also with a factor, for
  /// reduce_op::premul_sum.
  pending<collective_done> run(const collective& call, request_options options = {}) const;

private:
  friend class world;
  world_rank(world w, std::size_t rank);

  pending<collective_done> call(collective_kind what, const any_gpu_ref& send,
                                const any_gpu_ref& recv, reduce_op op, int peer,
                                const request_options& options) const;

  world world_;
  std::shared_ptr<detail::world_core> core_; // with a reference count of its own
  std::size_t rank_;
};

} // namespace troupe
