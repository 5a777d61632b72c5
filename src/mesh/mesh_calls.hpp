/// State that the ranks of a mesh share: which calls belong together, and how each joint call ends.
#pragma once

#include "operation/operation.hpp"
#include "runtime/device_losses.hpp"
#include <troupe/collective.hpp>
#include <troupe/collective_kind.hpp>
#include <troupe/dtype.hpp>
#include <troupe/error.hpp>
#include <troupe/gpu_ref.hpp>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace troupe::detail {

/// One rank's whole call; `count` as in `collective_call`.
struct mesh_spec {
  collective_kind what = collective_kind::barrier;
  dtype type = dtype::uint8;
  std::size_t count = 0;
  reduce_op op = reduce_op::sum;
  int peer = -1; ///< root, or the other rank of a message

  bool is_message() const noexcept { return troupe::is_message(what); }
};

/// One rank's side of a chunk. Work on a chunk begins only when the sides of all ranks are there.
struct chunk_side {
  any_gpu_ref send; ///< none: this rank sends nothing
  any_gpu_ref recv; ///< none: this rank receives nothing
  clock::time_point deadline = clock::time_point::max();
  std::uint64_t membership = 0;
  /// Called by the last rank, when it has requested the work for all ranks.
  std::function<void(const std::shared_ptr<operation_of<collective_done>>&)> on_begin;
};

/// A call of all ranks, or of the two ranks of a message. It ends once for all of them: when each
/// has done its part, or at the first failure.
/// @thread any
class joint_call {
public:
  using end_listener = std::function<void(const caf::error&)>;

  joint_call(const mesh_spec& first, int rank, std::vector<int> callers);

  /// The first rank's call. The other calls must match it, and it determines the chunks.
  const mesh_spec& spec() const noexcept { return first_; }
  /// Returns how `other`, of rank `rank`, differs from the first call; empty if it matches.
  std::string difference(const mesh_spec& other, int rank) const;

  /// Notes that `rank` has called.
  void enter(int rank);
  /// Returns the ranks that have not called; empty: none.
  std::string missing_ranks() const;

  caf::error error() const;
  /// Fails the call, unless it has ended already.
  void fail(const caf::error& why);
  /// Calls `act` when the call fails, or at once if it has failed.
  void on_failure(std::function<void()> act);

  /// Adds the side of `rank` in chunk `chunk`. Returns all sides, in the callers' order, to the
  /// last rank. Returns nothing to the other ranks, or if the call has failed.
  std::vector<chunk_side> meet(std::size_t chunk, int rank, chunk_side side);
  /// Notes that one more rank has done its part; `told` is called once, with the result.
  void finish(end_listener told);

private:
  struct meeting {
    std::vector<chunk_side> sides;
    std::size_t there = 0;
  };

  const mesh_spec first_;
  const int rank_;
  const std::vector<int> callers_;
  mutable std::mutex mutex_;
  std::vector<bool> entered_; // by caller
  bool done_ = false;
  caf::error error_;
  std::vector<std::function<void()>> listeners_;
  std::map<std::size_t, meeting> meetings_; // by chunk: the chunks that lack a side
  std::vector<end_listener> finished_;
};

/// Matches the ranks' calls: the k-th collective calls of all ranks belong together. So do the k-th
/// send from one rank to another and the k-th recv there.
/// @thread any
class mesh_calls {
public:
  /// `devices` is by rank.
  explicit mesh_calls(const std::vector<std::shared_ptr<device_state>>& devices)
      : ranks_(devices.size()), losses_(devices), closed_(ranks_, false) {}

  std::size_t ranks() const noexcept { return ranks_; }
  /// Callers do not know the chunks' memory, so its errors are replaced by the device's loss.
  const device_losses& losses() const noexcept { return losses_; }

  /// Returns the joint call of the next call of `rank`. If it cannot be done, it has failed.
  std::shared_ptr<joint_call> take(const mesh_spec& what, int rank);
  /// Notes that `rank` makes no more calls: joint calls that need one fail, now and later.
  void close(int rank);

private:
  struct line {
    std::vector<int> callers;
    std::vector<std::uint64_t> next; ///< number of the next call, by caller
    std::uint64_t first = 0;         ///< the number of open[0]
    std::deque<std::shared_ptr<joint_call>> open;
  };

  line& line_of(const mesh_spec& what, int rank);
  std::optional<int> missing(const line& in, std::uint64_t number) const;

  const std::size_t ranks_;
  const device_losses losses_;
  std::mutex mutex_;
  std::map<std::pair<int, int>, line> lines_; // by (from, to); collectives: (-1, -1)
  std::vector<bool> closed_;
};

} // namespace troupe::detail
