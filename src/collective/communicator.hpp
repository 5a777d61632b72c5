/// One communicator: which lanes may call it, and its end.
#pragma once

#include "foundation/rank_set.hpp"
#include "lane/lane.hpp"
#include "runtime/runtime.hpp"
#include <troupe/backend.hpp>
#include <troupe/collective.hpp>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

namespace troupe::detail {

/// Live from construction until it ends, once, with the first cause. From then on no lane enters
/// it. As soon as no lane is inside, or after `quiet_limit`, it is aborted in the background, or
/// destroyed if it retired.
class communicator : public std::enable_shared_from_this<communicator> {
public:
  /// `lanes`: the world's lanes, by rank; null for a rank of another process. Ranks in `absent`
  /// have no part in the communicator. `ranks`: the local ones of the others. `on_end` is called
  /// once, on the thread that ended the communicator, but not after `retire` or `discard`.
  /// `on_gone` is called when nothing of it is left on its devices.
  communicator(std::shared_ptr<runtime> runtime, std::uint64_t epoch, collective_way way,
               std::span<const std::shared_ptr<lane>> lanes, rank_set absent,
               communicator_ranks ranks, std::chrono::milliseconds quiet_limit,
               std::function<void(communicator&, const caf::error&)> on_end,
               std::function<void()> on_gone);
  ~communicator();

  std::uint64_t epoch() const noexcept { return epoch_; }
  collective_way way() const noexcept { return way_; }

  // Ranks are ranks of the world, unless stated otherwise.

  /// Returns the ranks of the world that are not in the communicator.
  rank_set absent() const noexcept { return absent_; }
  /// Returns the ranks that are in it, by their rank in the communicator.
  const std::vector<std::size_t>& members() const noexcept { return members_; }
  /// Returns the rank in the communicator of rank `i`, which is in it.
  std::size_t rank_of(std::size_t i) const noexcept { return rank_of_[i]; }
  /// Returns the members in this process; `lanes` returns their lanes.
  const std::vector<std::size_t>& local_ranks() const noexcept { return local_ranks_; }
  const std::vector<std::shared_ptr<lane>>& lanes() const noexcept { return lanes_; }
  /// Returns rank `i`, which is in this process.
  backend_communicator& rank(std::size_t i) noexcept { return *rank_at_[local_[i]]; }
  /// Returns the tenant that stands for rank `i` in the streams of its lane.
  stream_tenant& tenant(std::size_t i) noexcept { return tenants_[local_[i]]; }
  bool live() const noexcept { return live_.load(); }
  /// Returns whether the device of a rank, or the spare that the rank is on, is lost.
  bool has_lost_rank() const noexcept;
  /// Returns whether its devices can be lost one by one, as devices in workers can.
  bool can_lose_ranks() const noexcept { return !lives_.empty(); }
  /// Returns whether every call may be made on it, or only those of `connect_scope::collectives`.
  bool fully_connected() const noexcept { return fully_connected_.load(); }
  void set_fully_connected() noexcept { fully_connected_.store(true); }

  /// Calls `f` for rank `i` on its lane, unless the communicator has ended.
  /// @errors errc::communicator_dead: nothing was called
  template <class F> caf::error call(std::size_t i, lane& on, F f) {
    on.enter(this);
    if (!live()) {
      on.leave();
      return dead();
    }
    auto error = f(rank(i));
    on.leave();
    return error;
  }

  /// The same on any thread. Nothing of the communicator is destroyed before `f` returns.
  template <class F> caf::error call_from_outside(std::size_t i, F f) {
    visitors_.fetch_add(1);
    auto error = live() ? f(rank(i)) : dead();
    visitors_.fetch_sub(1);
    return error;
  }

  /// Returns why the communicator ended.
  caf::error dead() const;

  /// Ends the communicator because of `cause`, with which all pending operations on it complete.
  void fail(const caf::error& cause) noexcept;
  /// The same for an error that one rank saw. Where devices are lost one by one, other ranks see
  /// the loss of a device before its owner is told. So this waits for that loss, which then is the
  /// cause: up to `news_patience` if a rank's process has ended, else a short time.
  /// @thread a lane, or a thread that may block
  void fail_unless_lost(const caf::error& cause) noexcept;
  /// Ends it in good order; nothing is pending on it.
  void retire() noexcept;
  /// The same, as soon as nothing is pending on it. No operation is added any more.
  void retire_when_idle() noexcept;
  /// Ends it although a rank may be lost. Nothing is pending on it, and `on_end` is not called.
  void discard() noexcept;
  /// Calls `retire` if nothing is pending on it, else `fail`.
  void end(const caf::error& cause) noexcept;

private:
  bool is_pending() const noexcept;
  bool is_losing_rank() const noexcept;
  void end_quietly(bool healthy) noexcept;
  void note_closed() noexcept;
  void reap(bool healthy) noexcept;
  bool wait_until_quiet() noexcept;
  /// Returns indices of `lanes_`.
  std::vector<std::size_t> ranks_inside() const;
  bool give_up(const std::vector<std::size_t>& ranks, std::string_view what) noexcept;
  caf::error stuck(std::span<const std::size_t> ranks, std::string_view what) const;

  const std::shared_ptr<runtime> runtime_;
  const std::uint64_t epoch_;
  const collective_way way_;
  const rank_set absent_;
  std::vector<std::size_t> members_;
  std::vector<std::size_t> rank_of_; // by world rank: rank in the communicator
  std::vector<std::size_t> local_;   // by world rank: index in the vectors below
  std::vector<std::size_t> local_ranks_;
  std::vector<std::shared_ptr<lane>> lanes_;
  communicator_ranks ranks_;
  /// Points to `ranks_`: a lane stuck in a call may read it while the reaper takes `ranks_`.
  const std::vector<backend_communicator*> rank_at_;
  const std::vector<std::shared_ptr<const device_life>> lives_;
  std::vector<stream_tenant> tenants_;
  const std::chrono::milliseconds quiet_limit_;
  const std::function<void(communicator&, const caf::error&)> on_end_;
  const std::function<void()> on_gone_;
  std::atomic<bool> live_{true};
  std::atomic<int> visitors_{0}; // threads inside that are not lanes
  std::atomic<bool> fully_connected_{false};
  mutable std::mutex mutex_;
  caf::error cause_; // under mutex_
};

/// Handles `error`, the result of a call on a communicator for part `p` of `op`. A communicator
/// error ends the communicator. errc::out_of_memory ends it too: the rank may have stopped in the
/// middle of the work that needed the memory.
caf::error after_call(const operation& op, const part& p, communicator& on, caf::error error);

/// Returns the outcome of part `p` of `op`, whose call on a communicator gave `error`.
caf::expected<issue_outcome> issued(operation& op, const part& p, communicator& on,
                                    caf::error error);

/// Returns why the communicator ends because part `p` was not issued: for the reason `why`, or, if
/// there is none, because the operation failed before.
caf::error loss_error(const operation& op, const part& p, std::uint64_t epoch, caf::error why);

/// Returns why a communicator ends because `op` stalled.
caf::error stall_error(const operation& op, std::uint64_t epoch);

} // namespace troupe::detail
