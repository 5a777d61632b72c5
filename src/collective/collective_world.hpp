/// A world as its collectives see it.
#pragma once

#include "collective/communicator.hpp"
#include "collective/rank_call.hpp"
#include "collective/rank_matching.hpp"
#include "foundation/rank_set.hpp"
#include "operation/room.hpp"
#include "runtime/runtime.hpp"
#include <troupe/collective.hpp>
#include <troupe/world_status.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace troupe::detail {

/// The ranks of a world and their calls. The world (`world_core`) decides which communicator
/// requests run on.
class collective_world {
public:
  collective_world(const collective_world&) = delete;
  collective_world& operator=(const collective_world&) = delete;

  const std::shared_ptr<runtime>& owner() const noexcept { return runtime_; }
  const world_tag& tag() const noexcept { return tag_; }
  const world_limits& limits() const noexcept { return limits_; }
  std::size_t size() const noexcept { return lanes_.size(); }
  /// By rank; null if the rank is in another process.
  const std::vector<std::shared_ptr<lane>>& lanes() const noexcept { return lanes_; }
  /// Returns the ranks that are in this process: all, or one.
  const std::vector<std::size_t>& local_ranks() const noexcept { return local_ranks_; }
  /// Returns whether all ranks are in this process.
  bool is_whole() const noexcept { return local_ranks_.size() == lanes_.size(); }

  std::uint64_t membership(locked) const noexcept { return membership_; }
  /// Returns how often the set of absent ranks has changed.
  std::uint64_t absence_changes(locked) const noexcept { return absence_changes_; }
  rank_matching& matching() noexcept { return matching_; }
  /// Checks whether a request that names `membership`, and was made for a world without `absent`,
  /// may go on.
  /// @errors errc::unavailable: the world has ended; for a request that was admitted before, why it
  ///         ended. errc::membership_changed
  virtual caf::error check_view(locked lock, const operation& op, std::uint64_t membership,
                                rank_set absent) const = 0;
  /// Checks whether a request may go on that waits for ranks' calls since `absence_changes` had
  /// this value.
  /// @errors errc::membership_changed
  virtual caf::error check_ranks_since(locked lock, const operation& op,
                                       std::uint64_t absence_changes) const = 0;
  /// Counts one more waiting request. `leave_queue`, on any thread, ends that.
  /// @errors errc::overloaded: there is no room
  virtual caf::error enter_queue(locked lock, const operation& op, queue_bound bound) = 0;
  void leave_queue() noexcept {
    waiting_.fetch_sub(1);
    process_room.notify();
  }
  /// Returns whether a refused call of that rank counts. It does not if no other rank's calls come,
  /// or if they do not wait for it.
  virtual bool counts_calls_of(locked, const rank_end& x) const noexcept = 0;
  /// Returns the way that a collective with this call of a rank goes.
  virtual collective_way way_of(const rank_call& x) const noexcept = 0;
  /// Returns whether there is no communicator for this way now, but the world has not ended. If it
  /// is built only when it is needed, asks for it.
  virtual bool waits(locked, collective_way way) noexcept = 0;
  /// Returns whether that communicator still lacks connections.
  virtual bool waits_for_connections(locked, collective_way way) const noexcept = 0;
  virtual bool runs_on(locked, collective_way way, const communicator* x) const noexcept = 0;
  /// Returns the communicator of a request that need not wait, and describes it in `view`.
  virtual std::shared_ptr<communicator> join(locked, collective_way way,
                                             collective_done& view) const = 0;

  /// Returns an owner of this world.
  virtual std::shared_ptr<collective_world> self() = 0;

protected:
  collective_world(std::shared_ptr<runtime> runtime, const std::string& name,
                   std::vector<std::shared_ptr<lane>> lanes, const world_limits& limits);
  ~collective_world() = default;

  const std::shared_ptr<runtime> runtime_;
  const world_tag tag_;
  const std::vector<std::shared_ptr<lane>> lanes_;
  const std::vector<std::size_t> local_ranks_;
  const world_limits limits_;
  std::atomic<std::size_t> waiting_{0};
  // under the admission lock
  std::uint64_t membership_ = 0;
  std::uint64_t absence_changes_ = 0;
  rank_matching matching_;
};

} // namespace troupe::detail
