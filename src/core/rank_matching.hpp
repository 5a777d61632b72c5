/// Which rank-local calls of a world make one operation together.
#pragma once

#include "core/rank_call.hpp"
#include "core/rank_set.hpp"
#include "core/room.hpp"
#include "core/spare.hpp"
#include <troupe/collective_kind.hpp>
#include <troupe/error.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <thread>
#include <utility>
#include <vector>

namespace troupe::detail {

class collective_operation;
class rank_request;
struct part;
struct use;

/// A rank's call that was refused before any other rank had made its own: for these it ended as it
/// did for this one.
struct refused_call {
  caf::error why;
  std::uint64_t made_in = 0; ///< the world's membership then
};

/// Calls that belong together.
struct joint_entry {
  std::shared_ptr<collective_operation> op;    ///< null: the first of them was refused
  std::shared_ptr<const refused_call> refusal; ///< then
  std::size_t refused_by = 0;                  ///< the caller of that one
  std::uint64_t number = 0;                    ///< of the operation; of the first, if it is several
  std::size_t calls = 0;                       ///< made, or not waited for

  /// Why its calls are not done, and will not be; none if they may.
  caf::error why_ended() const;
  /// The world's membership when the first of its calls was made.
  std::uint64_t made_in() const noexcept;
};

/// A sequence of calls of some callers: their k-th ones belong together, but for those that are
/// left out meanwhile.
/// @thread under the lock of the order
class call_line {
public:
  explicit call_line(std::size_t callers) : next_(callers, 0) {}

  /// What the next call of `caller`, or the one after `before` others, belongs to; null if no
  /// caller has made its part of it yet. Until this changes.
  const joint_entry* next_of(std::size_t caller, std::size_t before = 0) const;
  bool empty() const noexcept { return open_.empty(); }
  /// How many calls `caller` has made that wait for somebody's.
  std::size_t ahead(std::size_t caller) const noexcept { return next_[caller] - first_; }
  /// How many calls of others wait for one of `caller`.
  std::size_t awaited(std::size_t caller) const noexcept { return end_ - next_[caller]; }
  /// Does the first operation that lacks calls lack one of `caller`?
  bool lacks(std::size_t caller) const noexcept {
    return !open_.empty() && next_[caller] < end_of(0);
  }
  std::size_t callers() const noexcept { return next_.size(); }
  rank_set left_out() const noexcept { return left_out_; }
  /// How many calls `caller` has made, or was not waited for.
  std::uint64_t made(std::size_t caller) const noexcept { return next_[caller]; }
  /// The next call of `caller` is made, a part of `op` if no other's is there yet.
  void take(std::size_t caller, const std::shared_ptr<collective_operation>& op);
  /// The next call of `caller` was refused, where no other's is there yet.
  void refuse(std::size_t caller, refused_call x);
  /// The next call of everybody is made; before it nobody's was missing.
  void take_of_all() noexcept;
  /// From now on `callers` are not waited for; the others of whom that was said before are again,
  /// from the next operation on.
  void leave_out(rank_set callers);
  /// No call comes any more: gives away the operations that still lack some.
  void give_away(std::vector<std::shared_ptr<collective_operation>>& to);

private:
  /// The number after those of `open_[i]`.
  std::uint64_t end_of(std::size_t i) const noexcept {
    return i + 1 < open_.size() ? open_[i + 1].number : end_;
  }
  std::size_t place_of(std::uint64_t number) const noexcept;
  void count_next_of(std::size_t caller);
  void begin_next();
  void forget_complete();

  std::deque<joint_entry> open_; // a rank's call is missing; in the order of their numbers
  std::uint64_t first_ = 0;      // the number of open_[0]
  std::uint64_t end_ = 0;        // the number after the last one's
  std::vector<std::uint64_t> next_;
  rank_set left_out_;
};

/// Where the lines lie that an operation of all ranks changes when it gets its place. It may be
/// gone: nobody looks into it. @thread any
struct alignas(64) place_lines {
  std::atomic<const collective_operation*> of{nullptr};
  std::atomic<const part*> parts{nullptr};
  std::atomic<const use*> uses{nullptr};
  std::atomic<const void*> calls{nullptr};
  std::atomic<const void*> requests{nullptr};
};

/// What a rank's call is of those that belong together.
struct rank_end {
  std::size_t rank = 0;
  collective_kind what = collective_kind::barrier;
  std::size_t peer = 0; ///< of a message

  rank_end(std::size_t of, collective_kind kind, std::size_t other) noexcept
      : rank(of), what(kind), peer(other) {}
  // NOLINTNEXTLINE(google-explicit-constructor): a call is one
  rank_end(const rank_call& x) noexcept
      : rank(x.rank), what(x.call.what), peer(static_cast<std::size_t>(x.call.peer)) {}

  bool is_message() const noexcept { return troupe::is_message(what); }
  /// From which rank to which.
  std::pair<std::size_t, std::size_t> ends() const noexcept {
    return what == collective_kind::send ? std::pair{rank, peer} : std::pair{peer, rank};
  }
};

/// The k-th collective call of each rank; for two ranks the k-th send from one to the other, and
/// the k-th call there that receives from it.
class rank_matching {
public:
  explicit rank_matching(std::size_t ranks)
      : spare_requests(ranks), collectives_(ranks), desks_(ranks), call_sides_(ranks) {}

  /// For the next collective call of each rank, and the operation that they make: that is taken
  /// under the lock of the order.
  std::vector<spare<rank_request>> spare_requests;
  spare<collective_operation> spare_joint;
  place_lines joint_lines; ///< of that

  // Without the lock.

  /// A thread makes a call of `rank`: the rank's calls are its, as far as is known.
  void note_caller(std::size_t rank) noexcept {
    auto& caller = call_sides_[rank].caller;
    if (auto self = std::this_thread::get_id(); caller.load(std::memory_order_relaxed) != self)
      caller.store(self, std::memory_order_relaxed);
  }
  /// Who makes the calls of `rank`, seen from this thread?
  room_maker maker_of(std::size_t rank) const noexcept;
  /// Takes one of the collective calls that `rank` may make without a look at its queues. False:
  /// there is none left.
  bool take_credit(std::size_t rank) noexcept {
    return call_sides_[rank].credit.fetch_sub(1, std::memory_order_relaxed) > 0;
  }
  /// There is room for so many more calls.
  void set_credit(std::size_t rank, std::size_t calls) noexcept {
    call_sides_[rank].credit.store(static_cast<int>(std::min(calls, most_credit)),
                                   std::memory_order_relaxed);
  }
  /// A collective call of `rank` was handed in, for the world without `absent`: have all others
  /// handed in as many? Then brings into the cache what placing their last ones takes; of this one
  /// that is `lines`.
  bool handed_in(std::size_t rank, rank_set absent, std::span<const std::byte> lines) noexcept;
  /// It was refused, and does not count.
  void refused(std::size_t rank) noexcept;

  // Under the lock of the order.

  /// An earlier call of `rank` was not handed in and counts, or will never be made.
  void passed_over(const rank_end& of) noexcept;
  /// A call was refused that counts, in a world of this membership. Returns the operation that it
  /// would have been a part of: it is to fail; null if no other call of it is there.
  std::shared_ptr<collective_operation> count_refused(const rank_end& of, const caf::error& why,
                                                      std::uint64_t membership);
  /// Who makes the calls that the first open operation of the line of `of` lacks, seen from this
  /// thread?
  room_maker maker_of_missing(const rank_end& of);
  /// The world is without `absent`, from the next operation on.
  void leave_out(rank_set absent);
  call_line& line_of(const rank_end& of);
  call_line& collectives() noexcept { return collectives_; }
  /// Does a collective lack somebody's call?
  bool waits_for_calls() const noexcept { return !collectives_.empty(); }
  /// As `call_line::give_away`.
  std::vector<std::shared_ptr<collective_operation>> give_away();
  /// The caller in that line.
  static std::size_t caller_of(const rank_end& of) noexcept;

private:
  call_line collectives_;
  static constexpr std::size_t most_credit = 64;

  struct desk {
    std::atomic<std::uint64_t> calls{0};
    std::atomic<const std::byte*> lines{nullptr}; // of the last one, which may be gone
  };
  struct alignas(64) call_side {           // its caller's alone, most of the time
    std::atomic<std::thread::id> caller{}; // of the last call
    std::atomic<int> credit{0};
  };

  std::vector<desk> desks_; // for collective calls of each rank
  std::vector<call_side> call_sides_;
  std::map<std::pair<std::size_t, std::size_t>, call_line> messages_; // from, to
};

} // namespace troupe::detail
