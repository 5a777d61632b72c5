/// Watches deadlines and stall limits, outside the lanes, since a lane can be blocked inside CUDA
/// or NCCL.
#pragma once

#include "core/fair_limit.hpp"
#include <troupe/detail/completion.hpp>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace troupe::detail {

class lane;
class operation;

class timekeeper {
public:
  timekeeper();
  ~timekeeper();
  timekeeper(const timekeeper&) = delete;
  timekeeper& operator=(const timekeeper&) = delete;

  /// Ends its thread: from then on nothing is watched. Not on that thread.
  void stop() noexcept;

  /// Keeps an eye on `x` until it settles.
  void add(operation& x);
  /// The same for one that may settle meanwhile.
  void add_late(operation& x);
  /// Nothing happens if it is not there.
  void remove(operation& x) noexcept;

  /// Calls `act` for every operation that is not settled, outside the lock.
  void for_each(const std::function<void(operation&)>& act);

  /// Calls `act` on the timekeeper's thread at `when`. The result can be given to `cancel_call`; 0:
  /// it has stopped, and never will.
  std::uint64_t call_at(clock::time_point when, std::function<void()> act);
  void cancel_call(std::uint64_t id) noexcept;

  std::size_t size() const noexcept;

private:
  struct call {
    std::uint64_t id;
    clock::time_point when;
    std::function<void()> act;
  };

  /// Operations that are watched; several, so that clients keep out of each other's way.
  struct alignas(64) shelf {
    mutable std::mutex mutex;
    operation* first = nullptr;
    operation* last = nullptr;
    std::size_t size = 0;
  };

  /// One whose stall limit is over. What it waits for may be done, and its lanes have not seen it
  /// yet, as the process stood still: they are asked to look once more.
  struct suspect {
    std::shared_ptr<completion> who;
    std::vector<std::pair<const lane*, std::uint64_t>> looks; ///< what their counts will be then
    clock::time_point until; ///< one may be in a call that does not return
  };

  shelf& shelf_of(const operation& x) noexcept;
  /// When to look at `x` again.
  clock::time_point due(const operation& x, clock::time_point now) const;
  /// Its lanes look once more.
  void ask(const std::shared_ptr<completion>& who, clock::time_point now);
  /// Those whose lanes have looked, to no avail.
  std::vector<std::shared_ptr<completion>> take_stalled(clock::time_point now);
  /// The stall limits of `stalled` count from now on.
  void count_anew(const std::vector<std::shared_ptr<completion>>& stalled);
  void wait(std::unique_lock<std::mutex>& lock, clock::time_point next);
  bool rest(std::unique_lock<std::mutex>& lock);
  void run();
  void look_at(shelf& x, clock::time_point now);
  void wake_at(clock::time_point when); // under mutex_

  std::array<shelf, 8> shelves_;
  std::mutex mutex_; // before a shelf's
  std::condition_variable condition_;
  std::atomic<clock::time_point> next_{clock::time_point::max()}; // changed under mutex_
  std::vector<std::shared_ptr<completion>> expired_;              // what a look has found
  std::vector<std::shared_ptr<completion>> suspected_;
  std::vector<suspect> suspects_; // the thread's
  running_time time_;             // that it saw pass
  bool quiet_ = false;            // nothing was to be watched for a tick
  std::vector<call> calls_;
  std::uint64_t next_call_ = 0;
  bool stop_ = false;
  std::thread thread_;
};

} // namespace troupe::detail
