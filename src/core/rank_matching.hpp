/// Which rank-local calls of a world make one operation together.
#pragma once

#include "core/rank_call.hpp"
#include "core/rank_set.hpp"
#include "core/room.hpp"
#include "core/spare.hpp"

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

/// A sequence of calls of some callers: their k-th ones belong together, but for those that are
/// left out meanwhile.
/// @thread under the lock of the order
class call_line {
public:
  explicit call_line(std::size_t callers) : next_(callers, 0) {}

  /// What the next call of `caller`, or the one after `before` others, belongs to; null if no
  /// caller has made its part of it yet.
  std::shared_ptr<collective_operation> next_of(std::size_t caller, std::size_t before = 0) const;
  bool empty() const noexcept { return open_.empty(); }
  /// The first operation that lacks calls; null: there is none.
  std::shared_ptr<collective_operation> first_waiting() const {
    return open_.empty() ? nullptr : open_.front().op;
  }
  /// How many calls `caller` has made that wait for somebody's.
  std::size_t ahead(std::size_t caller) const noexcept { return next_[caller] - first_; }
  /// How many calls of others wait for one of `caller`.
  std::size_t awaited(std::size_t caller) const noexcept { return open_.size() - ahead(caller); }
  rank_set left_out() const noexcept { return left_out_; }
  /// How many calls `caller` has made, or was not waited for.
  std::uint64_t made(std::size_t caller) const noexcept { return next_[caller]; }
  /// The next call of `caller` is made, a part of `op`.
  void take(std::size_t caller, const std::shared_ptr<collective_operation>& op);
  /// The next call of everybody is made; before it nobody's was missing.
  void take_of_all() noexcept;
  /// From now on `callers` are not waited for; the others of whom that was said before are again,
  /// from the next operation on.
  void leave_out(rank_set callers);
  /// No call comes any more: gives away the operations that still lack some.
  void give_away(std::vector<std::shared_ptr<collective_operation>>& to);

private:
  struct entry {
    std::shared_ptr<collective_operation> op;
    std::size_t calls = 0; // made, or not waited for
  };

  void forget_complete();

  std::deque<entry> open_;  // somebody's call is missing
  std::uint64_t first_ = 0; // the number of open_[0]
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

  /// An earlier call of the rank of `call` will never be made, which this one comes instead of.
  void passed_over(const rank_call& call) noexcept;
  /// The world is without `absent`, from the next operation on.
  void leave_out(rank_set absent);
  call_line& line_of(const rank_call& call);
  call_line& collectives() noexcept { return collectives_; }
  /// Does a collective lack somebody's call?
  bool waits_for_calls() const noexcept { return !collectives_.empty(); }
  /// As `call_line::give_away`.
  std::vector<std::shared_ptr<collective_operation>> give_away();
  /// The caller in that line.
  static std::size_t caller_of(const rank_call& call) noexcept;

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
