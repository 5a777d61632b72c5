/// What the ranks of a mesh have in common: which of their calls belong together, and how each of
/// these ends.
#pragma once

#include "core/device_losses.hpp"
#include "core/operation.hpp"
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

/// One rank's call as a whole; `count` as at `collective_call`.
struct mesh_spec {
  collective_kind what = collective_kind::barrier;
  dtype type = dtype::uint8;
  std::size_t count = 0;
  reduce_op op = reduce_op::sum;
  int peer = -1; ///< root, or the other side of a message

  bool is_message() const noexcept { return troupe::is_message(what); }
};

/// One rank's side of a chunk that the device is to work on: there are sides of all ranks, or none
/// of them is begun.
struct chunk_side {
  any_gpu_ref send; ///< none: nothing leaves this rank
  any_gpu_ref recv; ///< none: nothing comes here
  clock::time_point deadline = clock::time_point::max();
  std::uint64_t membership = 0;
  /// Called by the rank that came last, when the work for all of them is asked for.
  std::function<void(const std::shared_ptr<operation_of<collective_done>>&)> on_begin;
};

/// A call of all ranks, or of the two that exchange a message. It has one end, for all of them:
/// when each has done its part, or at the first failure.
/// @thread any
class joint_call {
public:
  using end_listener = std::function<void(const caf::error&)>;

  joint_call(const mesh_spec& first, int rank, std::vector<int> callers);

  /// The first rank's: what the others' must agree with, and what its chunks follow.
  const mesh_spec& spec() const noexcept { return first_; }
  /// What `other`, of rank `rank`, differs in; empty if it belongs here.
  std::string difference(const mesh_spec& other, int rank) const;

  /// `rank` has called.
  void enter(int rank);
  /// The ranks that have not; empty: there are none.
  std::string missing_ranks() const;

  caf::error error() const;
  /// Unless it has ended: the first end stays.
  void fail(const caf::error& why);
  /// Calls `act` when it fails, or at once if it has.
  void on_failure(std::function<void()> act);

  /// The side of `rank` in chunk `chunk`. All sides, in the callers' order, for the rank that came
  /// last; none for the others, or if it has failed.
  std::vector<chunk_side> meet(std::size_t chunk, int rank, chunk_side side);
  /// One more rank has done its part; `told` hears of the end, once.
  void finish(end_listener told);

private:
  struct meeting {
    std::vector<chunk_side> sides;
    std::size_t there = 0;
  };

  std::size_t place_of(int rank) const noexcept;

  const mesh_spec first_;
  const int rank_;
  const std::vector<int> callers_;
  mutable std::mutex mutex_;
  std::vector<bool> entered_; // of each caller
  bool done_ = false;
  caf::error error_;
  std::vector<std::function<void()>> listeners_;
  std::map<std::size_t, meeting> meetings_; // by chunk: those that lack a side
  std::vector<end_listener> finished_;
};

/// The k-th collective calls of all ranks belong together, and the k-th send from one rank to
/// another and the k-th recv there.
/// @thread any
class mesh_calls {
public:
  /// By rank.
  explicit mesh_calls(const std::vector<std::shared_ptr<device_state>>& devices)
      : ranks_(devices.size()), losses_(devices), closed_(ranks_, false) {}

  std::size_t ranks() const noexcept { return ranks_; }
  /// Chunks lie in memory that no caller knows.
  const device_losses& losses() const noexcept { return losses_; }

  /// The next call of `rank`; one that cannot be done has failed.
  std::shared_ptr<joint_call> take(const mesh_spec& what, int rank);
  /// `rank` makes no calls any more: what waits for one fails, and so does what will.
  void close(int rank);

private:
  struct line {
    std::vector<int> callers;
    std::vector<std::uint64_t> next; ///< of each caller
    std::uint64_t first = 0;         ///< the number of open[0]
    std::deque<std::shared_ptr<joint_call>> open;
  };

  line& line_of(const mesh_spec& what, int rank);
  std::optional<int> missing(const line& in, std::uint64_t number) const;

  const std::size_t ranks_;
  const device_losses losses_;
  std::mutex mutex_;
  std::map<std::pair<int, int>, line> lines_; // from, to; of collectives: -1, -1
  std::vector<bool> closed_;
};

} // namespace troupe::detail
