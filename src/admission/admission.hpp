/// Admission: gives operations their position in the process-wide order, and their predecessors on
/// every buffer.
#pragma once

#include "admission/held_operations.hpp"
#include "admission/retry_order.hpp"
#include "operation/operation.hpp"
#include "operation/room.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace troupe::detail {

class deadline_watch;

/// A submission: a request that makes one operation together with others, each for its part. For
/// each, in the queue's order, admission asks for the operation (`joint`), checks lanes and `uses`,
/// and lets it `join`; or does so for all submissions of an operation at once (`whole`,
/// `join_whole`). Then, without the lock, it calls `placed`.
class alignas(64) rank_submission {
public:
  virtual ~rank_submission() = default;

  /// Returns the operation that this submission belongs to. It is not admitted yet if this is its
  /// first submission. It passes `operation::on_check`.
  /// @errors why the submission cannot join
  virtual caf::expected<operation*> joint(locked lock) = 0;
  /// Returns an operation for this submission alone, to check it before it has any effect.
  /// @errors why the submission is refused
  virtual caf::expected<operation*> alone(locked lock, queue_bound bound) = 0;
  /// Notes that the submission was refused with `why`. It still counts among its caller's calls,
  /// except for some errors (`counts_among_calls`).
  virtual void count_refused(locked lock, const caf::error& why) = 0;
  /// Returns a key: submissions with the same key can make one operation together. Null: none can.
  virtual const void* match_key() const noexcept = 0;
  /// Returns the operation that `all` make together; this submission is the first of `all`. Returns
  /// null if a submission is missing, if one does not match the others, or if `operation::on_check`
  /// fails. Changes nothing: the submissions still have to join.
  virtual std::shared_ptr<operation> whole(locked lock, std::span<rank_submission* const> all) = 0;
  /// Does the same as `join` for each submission of `all`.
  virtual void join_whole(locked lock, std::span<rank_submission* const> all,
                          const std::shared_ptr<operation>& joint) = 0;
  /// Returns the uses that this submission adds to its operation.
  virtual std::span<const use> uses() const = 0;
  /// Adds the submission to its `joint` operation, which takes over the uses and keeps `self` while
  /// it needs it. Returns false if work is left for `placed`.
  virtual bool join(locked lock, std::shared_ptr<operation> self) = 0;
  /// Returns the error for a submission that never gets a position: its buffers wait for other
  /// requests that wait for this one.
  virtual caf::error refuse_cycle() = 0;

  /// Called after the lock is released. The submission was refused with `why`, or it has its
  /// position and possibly a reply.
  virtual void placed(const caf::error& why) = 0;

protected:
  /// Takes the reference that keeps the submission alive while it is in a list.
  std::shared_ptr<operation> take_self() noexcept { return std::move(self_); }

private:
  friend class admission;
  rank_submission* next_ = nullptr; // in the queue, or in a list of drained submissions
  std::shared_ptr<operation> self_;
  caf::error refusal_;
  std::shared_ptr<operation> complete_; // sent to the lanes with this submission
};

/// Orders operations and sends their parts to the lanes. An operation that waits for something that
/// no lane does (its world's next communicator) keeps its position in the order of its buffers, but
/// is held back from the lanes. Operations behind it are held back too: a lane that waited would
/// block the work that ends the wait. An operation that fails while it is held withdraws, as if it
/// had never had a position.
class admission : public std::enable_shared_from_this<admission> {
public:
  explicit admission(deadline_watch& deadlines) : deadlines_(deadlines) {}

  /// @errors why it is refused; the ranges that it would write are skipped, unless it fails
  ///         validation
  caf::error admit(const std::shared_ptr<operation>& op, room_policy room = room_policy::wait);

  /// Admits `all`, which is not empty, in this order and in one step, or none of them: no operation
  /// of another caller comes in between. What an earlier one of them overwrites, a later one may
  /// read. They count as one request where a queue is bounded. Their deadlines are the same.
  /// @errors why one of them is refused, whose index is then in `refused`; the caller marks the
  ///         ranges that all of them would have written
  caf::error admit_together(std::span<const std::shared_ptr<operation>> all, room_policy room,
                            std::size_t& refused);

  /// Admits further attempts of requests that may be made again, in this order and in one step,
  /// or refuses them one by one (`retry::refusal`). Returns false, and does nothing, if not as many
  /// requests as `expected` wait for another attempt.
  bool admit_again(std::span<retry> all, std::optional<std::size_t> expected);
  retry_order& retries(locked) noexcept { return retries_; }
  /// As `retry_order::new_record`.
  std::shared_ptr<retry_record> new_retry_record() const { return retries_.new_record(); }
  /// As `retry_order::losses`.
  std::uint64_t losses() const noexcept { return retries_.losses(); }

  /// Enqueues one submission of a joint operation, without the admission lock. The next thread that
  /// takes the lock drains the queue first (`drain`), so this submission precedes every
  /// later request. The operation is sent to the lanes with the last of its submissions.
  void enqueue(const std::shared_ptr<operation>& request, rank_submission& how) noexcept;
  /// Drains the queue: gives each enqueued submission its position.
  void drain();
  /// The same within a millisecond, on the deadline watch's thread. Placing all submissions of an
  /// operation together takes much less time than one by one.
  void drain_soon() noexcept;
  /// A submission that gets its position together with others.
  struct submission {
    std::shared_ptr<operation> self;
    rank_submission* how;
  };
  /// Gives all submissions of `all`, which one caller makes, their positions in one step, or none.
  /// @errors why one of them is refused: the caller handles the consequence for all of them
  caf::error place_together(std::span<const submission> all, queue_bound bound);
  /// Returns which threads make room in the queue of `full`.
  room_maker who_makes_room(locked lock, const lane& full) const;

  /// Sends held operations to the lanes if they wait for nothing any more. Call it when that may
  /// have changed, for example when an operation fails that is not on the lanes.
  void go_on() noexcept;
  /// The same for operations that waited only for held ones, of which some are now on the lanes.
  void go_on_behind() noexcept;
  /// The same as `go_on`, on the deadline watch's thread.
  void go_on_soon() noexcept;

private:
  using operations = std::vector<std::shared_ptr<operation>>;

  /// Actions that are deferred until the lock is released (`finish`).
  class deferred_actions {
  public:
    deferred_actions() = default;
    deferred_actions(const deferred_actions&) = delete;
    deferred_actions& operator=(const deferred_actions&) = delete;

    void add_placed(rank_submission& x) noexcept {
      x.next_ = nullptr;
      *end_ = &x;
      end_ = &x.next_;
    }
    rank_submission* placed() const noexcept { return placed_; }

    std::vector<part*> too_late;          ///< parts that their lanes did not take
    std::vector<held_operation> gone;     ///< operations that withdrew
    std::vector<predecessor> not_awaited; ///< of `gone`; to destroy one may need the lock
    std::vector<operation::dependent_failure> failed; ///< operations still to be completed

  private:
    // Submissions with work left; the others may be freed already.
    rank_submission* placed_ = nullptr;
    rank_submission** end_ = &placed_;
  };

  caf::error admit(const std::shared_ptr<operation>& op, room_choice how, bool& held);
  caf::error admit_together(std::span<const std::shared_ptr<operation>> all, queue_bound bound,
                            std::size_t& refused, operations& held);
  room_maker who_makes_room(locked lock, const operation& op, queue_bound bound) const;
  caf::error place(locked lock, const std::shared_ptr<operation>& op, queue_bound bound,
                   std::int64_t now, bool& held, deferred_actions& after);
  /// The same for an operation that is not deferred.
  caf::error place_now(locked lock, const std::shared_ptr<operation>& op, queue_bound bound,
                       std::int64_t now, bool& held, deferred_actions& after);
  void watch_held(const std::shared_ptr<operation>& op);
  /// Gives a checked operation its position. Sets `held` if the operation is not on the lanes yet.
  void commit(locked lock, const std::shared_ptr<operation>& op, std::int64_t now, bool& held,
              deferred_actions& after);
  /// Runs before anything is placed: withdraws operations that failed and drains the queue.
  void bring_up_to_date(locked lock, deferred_actions& after);
  void place_all(locked lock, rank_submission* last, deferred_actions& after);
  /// Places `all` if they make one valid operation; else changes nothing.
  bool place_whole(locked lock, std::span<rank_submission* const> all, deferred_actions& after);
  caf::error join(locked lock, rank_submission& one, deferred_actions& after);
  static caf::error check_alone(locked lock, const operation& request, rank_submission& how,
                                queue_bound bound);
  void finish(deferred_actions& after);
  void after_placing(rank_submission* done);
  static void submit(locked lock, operation& op, deferred_actions& after);
  void remove_failed(locked lock, deferred_actions& after);
  /// Sends held operations to the lanes that wait for nothing any more. `all`: also those that
  /// waited for something other than held operations.
  void release(bool all) noexcept;

  deadline_watch& deadlines_;
  held_operations held_; // under the admission lock, as the next three
  retry_order retries_;
  std::uint64_t last_access_ = 0; // the last `access::since`
  std::uint64_t failed_ = 0;      // `operation::failed_off_lanes` at the last look
  std::atomic<std::size_t> asked_{0};
  std::atomic<bool> asked_for_all_{false};
  std::atomic<bool> soon_{false};
  std::atomic<rank_submission*> queue_{nullptr}; // the newest
  std::atomic<bool> placing_soon_{false};
};

} // namespace troupe::detail
