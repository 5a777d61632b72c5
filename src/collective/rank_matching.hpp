/// Matches rank-local calls of a world: which of them make one operation together.
#pragma once

#include "collective/rank_call.hpp"
#include "foundation/object_pool.hpp"
#include "foundation/rank_set.hpp"
#include "foundation/thread_number.hpp"
#include "operation/admission_lock.hpp"
#include "operation/room.hpp"
#include <troupe/collective_kind.hpp>
#include <troupe/error.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

namespace troupe::detail {

class collective_operation;
class rank_request;
struct part;
struct use;

/// A rank's call that was refused before any other rank had made its matching call. The matching
/// calls end in the same way.
struct refused_call {
  caf::error why;
  std::uint64_t membership = 0; ///< the world's membership then
};

/// Calls that belong together, or several refused ones in a row.
struct joint_entry {
  std::shared_ptr<collective_operation> op;    ///< null: the first of them was refused
  std::shared_ptr<const refused_call> refusal; ///< set if `op` is null
  std::size_t refused_by = 0;                  ///< the caller of the refused call
  std::uint64_t number = 0; ///< of the operation; of the first, if there are several
  std::size_t calls = 0;    ///< made, or not waited for

  /// Returns why its calls will not be done; none if they may.
  caf::error why_ended(locked lock) const;
  /// Returns the world's membership when the first of its calls was made.
  std::uint64_t first_membership() const noexcept;
};

/// A queue of calls. The k-th calls of its callers belong together, except those of callers that
/// are left out at that time.
/// @thread under the admission lock
class call_queue {
public:
  explicit call_queue(std::size_t callers) : next_(callers, 0) {}

  /// Returns what the next call of `caller`, or the one after `before` more, belongs to. Null if no
  /// other caller has made its call of it yet. Valid until this changes.
  const joint_entry* next_of(std::size_t caller, std::size_t before = 0) const;
  bool empty() const noexcept { return open_.empty(); }
  /// Returns how many calls of `caller` wait for calls of others.
  std::size_t ahead(std::size_t caller) const noexcept { return next_[caller] - first_; }
  /// Returns how many calls of others wait for one of `caller`.
  std::size_t awaited(std::size_t caller) const noexcept { return end_ - next_[caller]; }
  /// Returns whether the first operation that lacks calls lacks one of `caller`.
  bool lacks(std::size_t caller) const noexcept {
    return !open_.empty() && next_[caller] < end_of(0);
  }
  std::size_t callers() const noexcept { return next_.size(); }
  rank_set left_out() const noexcept { return left_out_; }
  /// Returns how many calls `caller` has made, or was not waited for.
  std::uint64_t made(std::size_t caller) const noexcept { return next_[caller]; }
  /// Counts the next call of `caller`, which belongs to `op` if no other caller's is there yet.
  void take(std::size_t caller, const std::shared_ptr<collective_operation>& op);
  /// Counts the next call of `caller` as refused. No other caller has made its call yet.
  void refuse(std::size_t caller, refused_call x);
  /// Counts the next call of every caller. Before it, no calls may be missing.
  void take_of_all() noexcept;
  /// From now on, `callers` are not waited for. Callers that were left out before and are not in
  /// `callers` are waited for again, from the next operation on.
  void leave_out(rank_set callers);
  /// Moves the operations that still lack calls to `to`, because no call comes any more.
  void give_away(std::vector<std::shared_ptr<collective_operation>>& to);

private:
  /// Returns the number after those of `open_[i]`.
  std::uint64_t end_of(std::size_t i) const noexcept {
    return i + 1 < open_.size() ? open_[i + 1].number : end_;
  }
  std::size_t index_of(std::uint64_t number) const noexcept;
  void count_next_of(std::size_t caller);
  void begin_next();
  void forget_complete();

  std::deque<joint_entry> open_; // a rank's call is missing; by number
  std::uint64_t first_ = 0;      // the number of open_[0]
  std::uint64_t end_ = 0;        // the number after the last one
  std::vector<std::uint64_t> next_;
  rank_set left_out_;
};

/// One rank's end of a call, by which calls are matched.
struct rank_end {
  std::size_t rank = 0;
  collective_kind what = collective_kind::barrier;
  std::size_t peer = 0; ///< of a message

  rank_end(std::size_t of, collective_kind kind, std::size_t other) noexcept
      : rank(of), what(kind), peer(other) {}
  // NOLINTNEXTLINE(google-explicit-constructor): a call is such an end
  rank_end(const rank_call& x) noexcept
      : rank(x.rank), what(x.call.what), peer(static_cast<std::size_t>(x.call.peer)) {}

  bool is_message() const noexcept { return troupe::is_message(what); }
  /// Returns the sending and the receiving rank.
  std::pair<std::size_t, std::size_t> ends() const noexcept {
    return what == collective_kind::send ? std::pair{rank, peer} : std::pair{peer, rank};
  }
};

/// Matches the k-th collective calls of all ranks. For two ranks, matches the k-th send of one to
/// the other with the k-th recv there from it.
class rank_matching {
public:
  explicit rank_matching(std::size_t ranks)
      : request_pools(ranks), collectives_(ranks), calls_(ranks), call_sides_(ranks) {}

  /// Made in advance: each rank's next collective request, and the operation that these make.
  /// `joint_pool` is taken under the admission lock.
  std::vector<object_pool<rank_request>> request_pools;
  object_pool<collective_operation> joint_pool;

  /// Notes that this thread makes the calls of `rank`, as far as is known.
  void note_caller(std::size_t rank) noexcept {
    auto& caller = call_sides_[rank].caller;
    if (auto self = thread_number(); caller.load(std::memory_order_relaxed) != self)
      caller.store(self, std::memory_order_relaxed);
  }
  /// Returns which threads make the calls of `rank`, seen from this thread.
  room_maker maker_of(std::size_t rank) const noexcept;
  /// Takes one of the collective calls that `rank` may make unchecked. False: none is left.
  bool take_credit(std::size_t rank) noexcept {
    return call_sides_[rank].credit.fetch_sub(1, std::memory_order_relaxed) > 0;
  }
  /// Sets for how many more calls there is room.
  void set_credit(std::size_t rank, std::size_t calls) noexcept {
    call_sides_[rank].credit.store(static_cast<int>(std::min(calls, most_credit)),
                                   std::memory_order_relaxed);
  }
  /// Notes that a collective call of `rank` was enqueued, for the world without `absent`. Returns
  /// whether all other ranks have enqueued as many.
  bool handed_in(std::size_t rank, rank_set absent) noexcept;
  /// Undoes `handed_in`: the call was refused and does not count.
  void refused(std::size_t rank) noexcept;

  /// Adds to the rank's counter a call that counts but was not enqueued, or never will be made.
  void passed_over(locked, const rank_end& of) noexcept;
  /// Counts a refused call, in a world of this membership. Returns the operation that it would
  /// belong to, which the caller must fail. Null if no other call of it is there.
  std::shared_ptr<collective_operation>
  count_refused(locked lock, const rank_end& of, const caf::error& why, std::uint64_t membership);
  /// As `maker_of`, for the calls that the first open operation in the queue of `of` lacks.
  room_maker maker_of_missing(locked lock, const rank_end& of);
  /// Leaves out `absent`, from the next operation on.
  void leave_out(locked, rank_set absent);
  call_queue& line_of(locked, const rank_end& of);
  call_queue& collectives(locked) noexcept { return collectives_; }
  /// Returns whether a collective lacks a call.
  bool waits_for_calls(locked) const noexcept { return !collectives_.empty(); }
  /// As `call_queue::give_away`.
  std::vector<std::shared_ptr<collective_operation>> give_away(locked);
  /// Returns the caller's index in the queue of `of`.
  static std::size_t caller_of(const rank_end& of) noexcept;

private:
  call_queue collectives_;
  static constexpr std::size_t most_credit = 64;

  struct alignas(64) call_side {          // used by one thread, most of the time
    std::atomic<std::uint64_t> caller{0}; // of the last call: its `thread_number`; 0: none
    std::atomic<int> credit{0};
  };

  std::vector<std::atomic<std::uint64_t>> calls_; // how many collectives were called, by rank
  std::vector<call_side> call_sides_;
  std::map<std::pair<std::size_t, std::size_t>, call_queue> messages_; // by (from, to)
};

} // namespace troupe::detail
