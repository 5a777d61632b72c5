/// Watches deadlines and stall limits, outside the lanes, since a lane can be blocked inside CUDA
/// or NCCL.
#pragma once

#include "foundation/fair_limit.hpp"
#include "operation/operation.hpp"
#include <troupe/detail/completion.hpp>

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

class deadline_watch final : public operation_watch {
public:
  deadline_watch();
  ~deadline_watch();
  deadline_watch(const deadline_watch&) = delete;
  deadline_watch& operator=(const deadline_watch&) = delete;

  /// Ends its thread: from then on nothing is watched. Not to be called on that thread.
  void stop() noexcept;

  /// Watches `x` until it settles.
  void add(operation& x);
  /// The same for an operation that may settle meanwhile.
  void add_late(operation& x);
  /// Stops watching `x`. Does nothing if `x` is not watched.
  void remove(operation& x) noexcept override;

  /// Calls `act` for every operation that is not settled, without the lock.
  void for_each(const std::function<void(operation&)>& act);

  /// Calls `act` on the deadline watch's thread at `when`. Returns an id for `cancel_call`; 0: the
  /// watch has stopped, and `act` is never called.
  std::uint64_t call_at(clock::time_point when, std::function<void()> act);
  void cancel_call(std::uint64_t id) noexcept;

  std::size_t size() const noexcept;

private:
  struct call {
    std::uint64_t id;
    clock::time_point when;
    std::function<void()> act;
  };

  /// An operation whose stall limit is over. If the process was stopped, its work may be done
  /// although its lanes have not seen that. So they are asked to look once more.
  struct suspect {
    std::shared_ptr<completion> who;
    std::vector<std::pair<const lane*, std::uint64_t>> looks; ///< lanes, and counts to wait for
    clock::time_point until; ///< end of the wait: a lane may be in a call that does not return
  };

  /// Returns when to look at `x` again.
  clock::time_point due(const operation& x, clock::time_point now) const;
  /// Asks the lanes of `who` to look once more.
  void ask(const std::shared_ptr<completion>& who, clock::time_point now);
  /// Takes out the suspects whose lanes have looked in vain, or have not looked in time.
  std::vector<std::shared_ptr<completion>> take_stalled(clock::time_point now);
  /// Lets the stall limits of `stalled` begin again.
  void count_anew(const std::vector<std::shared_ptr<completion>>& stalled);
  void wait(std::unique_lock<std::mutex>& lock, clock::time_point next);
  bool rest(std::unique_lock<std::mutex>& lock);
  void run();
  void look(clock::time_point now);
  void wake_at(clock::time_point when); // under mutex_

  /// The watched operations, in the order in which they came. Clients change the list, so it has
  /// cache lines of its own.
  struct alignas(64) watched {
    mutable std::mutex mutex;
    operation* first = nullptr;
    operation* last = nullptr;
    std::size_t size = 0;
  } list_;
  alignas(64) std::mutex mutex_; // locked before that of the list
  std::condition_variable condition_;
  std::atomic<clock::time_point> next_{clock::time_point::max()}; // changed under mutex_
  std::vector<std::shared_ptr<completion>> expired_;              // found by `look`
  std::vector<std::shared_ptr<completion>> suspected_;
  std::vector<suspect> suspects_; // only the thread's
  running_time time_;             // seen by the thread
  bool quiet_ = false;            // nothing was watched for a tick
  std::vector<call> calls_;
  std::uint64_t next_call_ = 0;
  bool stop_ = false;
  std::thread thread_;
};

} // namespace troupe::detail
