/// One communicator: which lanes may call it, and its end.
#pragma once

#include "core/lane.hpp"
#include "core/rank_set.hpp"
#include "core/runtime.hpp"
#include "core/symmetric_memory.hpp"
#include <troupe/backend.hpp>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

namespace troupe::detail {

/// Live from its making until it ends, once, for the first cause. Then no lane enters it any more;
/// as soon as none is inside (at most `quiet_limit`), it is aborted in the background, or destroyed
/// if it ended well.
class communicator : public std::enable_shared_from_this<communicator> {
public:
  /// Of the world's `lanes`, by rank, those of `absent` have no part in it; where there is none,
  /// the rank is in another process; `ranks` are the others. `on_end` hears of the end, once, on
  /// the thread that ended it, unless it retired; `on_gone` when nothing of it is left on its
  /// devices.
  communicator(std::shared_ptr<runtime> runtime, std::uint64_t epoch,
               std::span<const std::shared_ptr<lane>> lanes, rank_set absent,
               communicator_ranks ranks, std::chrono::milliseconds quiet_limit,
               std::function<void(communicator&, const caf::error&)> on_end,
               std::function<void()> on_gone);
  ~communicator();

  std::uint64_t epoch() const noexcept { return epoch_; }

  // Ranks are the world's, but where it says so.

  /// The ranks of the world that it is without.
  rank_set absent() const noexcept { return absent_; }
  /// Those that it has, by their place in it.
  const std::vector<std::size_t>& members() const noexcept { return members_; }
  /// The place in it of rank `i`, which it has.
  std::size_t place_of(std::size_t i) const noexcept { return place_[i]; }
  /// Those of them that are in this process, and their lanes.
  const std::vector<std::size_t>& local_ranks() const noexcept { return local_ranks_; }
  const std::vector<std::shared_ptr<lane>>& lanes() const noexcept { return lanes_; }
  /// Rank `i`, which is in this process.
  backend_communicator& rank(std::size_t i) noexcept { return *rank_at_[local_[i]]; }
  /// Whom the streams of its lane know it as.
  stream_tenant& tenant(std::size_t i) noexcept { return tenants_[local_[i]]; }
  bool live() const noexcept { return live_.load(); }
  /// Is the device of a rank lost, or the spare that it is of?
  bool has_lost_rank() const noexcept;
  /// Can devices of it be lost one by one, as those in workers?
  bool can_lose_ranks() const noexcept { return !lives_.empty(); }
  /// Whether every call may be made on it, or only what `connect_scope::collectives` allows.
  bool fully_connected() const noexcept { return fully_connected_.load(); }
  void set_fully_connected() noexcept { fully_connected_.store(true); }

  /// All ranks, `parts` of them, will issue a symmetric call, by `call_for_sure`, each of which
  /// ends with `end_symmetric`; until then nothing of the communicator is touched, even if it ends.
  /// False: it has ended.
  bool begin_symmetric(std::uint32_t parts) noexcept;
  void end_symmetric(std::size_t rank) noexcept {
    symmetric_ended_[local_[rank]].fetch_add(1, std::memory_order_relaxed);
    symmetric_.fetch_sub(1, std::memory_order_release);
  }

  // -- its windows, under the lock of the order

  /// None if memory may be registered; else why it was not.
  const caf::error& windows_closed() const noexcept { return windows_closed_; }
  /// The ranks' windows may differ from now on: none is used any more.
  void close_windows(const caf::error& why) { windows_closed_ = why; }
  /// Keeps `x` until it is let go, or nothing of the communicator is left.
  void keep_window(std::shared_ptr<symmetric_memory> x);
  void let_go_window(const std::shared_ptr<symmetric_memory>& x);

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

  /// The same on any thread; nothing of it is taken down before `f` returns.
  template <class F> caf::error call_from_outside(std::size_t i, F f) {
    visitors_.fetch_add(1);
    auto error = live() ? f(rank(i)) : dead();
    visitors_.fetch_sub(1);
    return error;
  }

  /// `call`, whether it has ended or not: others rely on this rank (`begin_symmetric`).
  template <class F> caf::error call_for_sure(std::size_t i, lane& on, F f) {
    on.enter(this);
    auto error = f(rank(i));
    on.leave();
    return error;
  }

  /// Why it ended.
  caf::error dead() const;

  /// Ends it because of `cause`; everything pending on it is answered with it.
  void fail(const caf::error& cause) noexcept;
  /// The same for what one rank saw: where devices are lost one by one, others see the loss of a
  /// device before its owner hears of it. So it waits for that, which then is the cause: as long as
  /// it takes where a rank's process has ended, else a moment.
  /// @thread a lane, or one that may block
  void fail_unless_lost(const caf::error& cause) noexcept;
  /// Ends it in good order; nothing is pending on it.
  void retire() noexcept;
  /// The same, as soon as nothing is pending on it; nothing is added any more.
  void retire_when_idle() noexcept;
  /// Ends it, though one of its ranks may be lost; nothing is pending on it, and nobody hears of
  /// it.
  void discard() noexcept;
  /// `retire` if nothing is pending on it, else `fail`.
  void end(const caf::error& cause) noexcept;

private:
  bool is_pending() const noexcept;
  bool is_losing_rank() const noexcept;
  void end_quietly(bool healthy) noexcept;
  void reap(bool healthy) noexcept;
  bool wait_until_quiet() noexcept;
  bool wait_for_symmetric() noexcept;
  // By index of `lanes_`.
  std::vector<std::size_t> ranks_inside() const;
  std::vector<std::size_t> ranks_in_symmetric() const;
  bool give_up(const std::vector<std::size_t>& ranks, std::string_view what) noexcept;
  void end_process(const std::vector<std::size_t>& ranks, std::string_view what) noexcept;
  caf::error stuck(std::span<const std::size_t> ranks, std::string_view what) const;
  void let_go_windows() noexcept;

  const std::shared_ptr<runtime> runtime_;
  const std::uint64_t epoch_;
  const rank_set absent_;
  std::vector<std::size_t> members_;
  std::vector<std::size_t> place_; // by rank of the world
  std::vector<std::size_t> local_; // the same: index of what follows
  std::vector<std::size_t> local_ranks_;
  std::vector<std::shared_ptr<lane>> lanes_;
  communicator_ranks ranks_;
  /// The same; a lane that is stuck in a call may look while the reaper takes them.
  const std::vector<backend_communicator*> rank_at_;
  const std::vector<std::shared_ptr<const device_life>> lives_;
  std::vector<stream_tenant> tenants_;
  const std::chrono::milliseconds quiet_limit_;
  const std::function<void(communicator&, const caf::error&)> on_end_;
  const std::function<void()> on_gone_;
  std::atomic<bool> live_{true};
  std::atomic<int> visitors_{0}; // that are no lanes
  std::atomic<bool> fully_connected_{false};
  static constexpr std::uint32_t no_more = 1u << 31;
  std::atomic<std::uint32_t> symmetric_{0}; // parts of symmetric calls that are not over
  std::vector<std::atomic<std::uint64_t>> symmetric_ended_; // of each rank: those that are
  std::vector<std::shared_ptr<symmetric_memory>> windows_;
  caf::error windows_closed_;
  mutable std::mutex mutex_;
  caf::error cause_; // under mutex_
};

} // namespace troupe::detail
