/// Bounded queues: which requests wait for room in them, and which are refused.
#pragma once

#include <troupe/collective.hpp>
#include <troupe/detail/completion.hpp>
#include <troupe/error.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>

namespace troupe::detail {

/// The bound up to which a request may fill a queue.
enum class queue_bound : std::uint8_t { first, second };

/// A caller that must not block may fill a queue up to this many times its first bound.
inline constexpr std::size_t second_bound_factor = 16;

inline std::size_t limit_of(std::size_t first, queue_bound x) noexcept {
  return x == queue_bound::first || first > SIZE_MAX / second_bound_factor
             ? first
             : first * second_bound_factor;
}

/// How a request treats a full queue.
struct room_choice {
  bool waits = false;
  queue_bound bound = queue_bound::first;
};

/// Returns the choice for a request of this thread. A thread that may block waits; an actor, a
/// callback and a lane may go up to the second bound.
room_choice choose_room(room_policy wanted) noexcept;

/// The threads that must act before there is room.
enum class room_maker : std::uint8_t {
  others,  ///< lanes, or other threads
  unknown, ///< a thread that has not been seen yet
  caller,  ///< the thread that would wait
};

/// How long a caller waits for a rank that has made no call at all yet.
inline constexpr std::chrono::nanoseconds first_call_patience = std::chrono::seconds{1};

/// Wakes callers that wait for room in any queue of the process.
/// @thread any
class room_signal {
public:
  /// Wakes callers, because there may be room. Cheap while no caller waits, and so without a fence:
  /// a caller that begins to wait at this moment may miss it, and looks again by itself.
  void notify() noexcept {
    if (waiting_.load(std::memory_order_relaxed) != 0)
      wake();
  }

  /// A caller that looks for room.
  class watch {
  public:
    explicit watch(room_signal& on) noexcept;
    ~watch();
    watch(const watch&) = delete;
    watch& operator=(const watch&) = delete;
    /// Blocks until there was a `notify` since the last call, or `until`, or for a millisecond.
    void wait(clock::time_point until) noexcept;

  private:
    room_signal& on_;
    std::uint64_t seen_ = 0;
  };

private:
  void wake() noexcept;

  std::atomic<int> waiting_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t count_ = 0; // of changes; under mutex_
};

extern room_signal& process_room;

/// Returns the error of a request that found no room before its deadline, because of `full`.
caf::error too_late_for_room(const caf::error& full);

/// Calls `attempt`. If the result is errc::overloaded and `how` waits, calls it again whenever
/// there may be room. `maker` returns which threads have to make room.
template <class Attempt, class Maker>
caf::error find_room(room_choice how, clock::time_point deadline, Attempt attempt, Maker maker) {
  auto error = attempt();
  if (!how.waits || code_of(error) != errc::overloaded)
    return error;
  room_signal::watch room{process_room};
  const auto patience = from_now(first_call_patience);
  for (;;) {
    auto again = attempt();
    if (code_of(again) != errc::overloaded)
      return clock::now() >= deadline && again ? too_late_for_room(error) : again;
    error = std::move(again);
    auto made_by = maker();
    if (made_by == room_maker::caller)
      return error;
    auto until = made_by == room_maker::unknown ? std::min(deadline, patience) : deadline;
    if (clock::now() >= until)
      return until == deadline ? too_late_for_room(error) : error;
    room.wait(until);
  }
}

} // namespace troupe::detail
