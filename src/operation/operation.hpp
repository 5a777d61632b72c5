/// An admitted request: its parts on the lanes, its requesters and its successors.
#pragma once

#include "operation/admission_lock.hpp"
#include "operation/buffer.hpp"
#include "operation/flight_ring.hpp"
#include "operation/room.hpp"
#include <troupe/backend.hpp>
#include <troupe/detail/completion.hpp>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace troupe::detail {

class device_state;
class lane;
class operation;
class retry_record;

/// Watches operations until they settle (`deadline_watch`).
class operation_watch {
public:
  /// Stops watching `x`. Does nothing if `x` is not watched.
  virtual void remove(operation& x) noexcept = 0;

protected:
  ~operation_watch() = default;
};

/// The streams of a lane. `overlap`: the stream of its predecessor, or one without work, among
/// `compute` and a few others; chosen when the part is issued. `collective`: one of several; a
/// communicator has its own while it has work on the lane. `peer`: one for each other device
/// (`part::peer`), for copies over the link to it. `lend`: for operations that wait until memory
/// can be lent to another process. `memory`: for allocations; nothing in it waits, so no allocation
/// waits for a kernel. `user`: the part is work of a user's stream, over when an event there is; no
/// work of the lane waits for it but what follows the part. `none`: the part is over when its issue
/// returns.
enum class stream_kind : std::uint8_t {
  compute,
  upload,
  download,
  memory,
  lend,
  user,
  overlap,
  collective,
  peer,
  none
};
inline constexpr std::size_t stream_count = 9;

/// Returns whether parts of this kind are work in a stream of the lane, behind their predecessors.
constexpr bool in_lane_stream(stream_kind x) noexcept {
  return x != stream_kind::none && x != stream_kind::user;
}

/// A communicator rank or a link, whose work on a lane is in one stream, in order. It may move to
/// another stream when none of its work is in flight. @thread the lane
struct alignas(64) stream_tenant { // own cache line: lanes change their tenants often
  std::size_t stream = static_cast<std::size_t>(stream_kind::collective);
  std::size_t in_flight = 0; ///< parts in flight or continuing
};

/// A range of memory that an operation uses.
struct use {
  std::shared_ptr<buffer> memory;
  std::size_t begin = 0; // bytes
  std::size_t end = 0;
  bool reads = false;
  bool writes = false;
  std::uint32_t part = 0; // index of the part that accesses the range
  skipped_reads accepted = {};
};

/// Why a request is answered before its work is over. A cancelled request that was not issued
/// counts as never made. An expired one leaves the ranges that it would have written skipped.
enum class early_end : std::uint8_t { cancelled, expired };

/// Returns the state of the device of a lane. Defined with the lane.
const device_state& device_state_of(const lane& x) noexcept;

/// Work that must come first, on another stream or device. Also on the same stream if `memory`
/// belongs to another device than the lane's: such memory outlives what the lane drops in a reset.
struct predecessor {
  std::shared_ptr<operation> of;
  const part* at;
  const buffer* memory; ///< that both operations use; valid until the later one settles
};

/// The work of one device for an operation. Aligned to a cache line, because several lanes may work
/// on one operation at the same time.
struct alignas(64) part {
  /// `skipped`: never issued, and earlier work is over or in its stream. `dropped`: never issued,
  /// and its successors must wait for its `predecessors`, which then stay unchanged.
  enum class state : std::uint8_t { queued, issuing, issued, started, done, skipped, dropped };

  operation* of = nullptr;
  lane* on = nullptr;
  std::size_t index = 0;
  int rank = -1; ///< in a collective
  int peer = -1; ///< the other device (`stream_kind::peer`)
  stream_kind stream = stream_kind::compute;
  stream_tenant* tenant = nullptr;      ///< the communicator rank whose work this is; null: none
  const stream_tenant* after = nullptr; ///< follows all in-flight work of this tenant; null: none
  /// Issued into a stream behind work of another tenant.
  std::atomic<bool> behind_others{false};
  bool uses_memory = false;
  bool is_placeholder = false; ///< placeholder: never issued, only its event is in the stream
  /// A short copy over a link. It is issued in one call with the small copies that follow directly.
  bool is_small_copy = false;
  bool shares_event = false; ///< its event is another object's, which returns it
  /// The result was delivered to this part's own requester, whatever happens to the other parts.
  std::atomic<bool> delivered{false};
  std::vector<predecessor> predecessors;
  const void* needs = nullptr; ///< of the verb: what its issue reads
  /// Generation of the memory that it uses; 0: no use was noted yet. `several_generations` if the
  /// generations differ, or if some of the memory is borrowed or on another device than its lane's.
  std::uint64_t generation = 0;
  static constexpr std::uint64_t several_generations = UINT64_MAX;
  std::uint32_t uses_begin = 0; ///< its uses are among these (`operation::uses_of`)
  std::uint32_t uses_end = 0;
  part* next = nullptr;     // in the lane's inbox
  std::uint64_t record = 0; // in the lane's flight ring; only the lane uses it

  std::atomic<state> at{state::queued};
  std::atomic<bool> claimed{false}; ///< its lane has reached it: the operation cannot be withdrawn
  std::atomic<bool> begun{false};   ///< the call that issues it has begun
  /// When all earlier work was done, in nanoseconds of `clock`; 0: not yet.
  std::atomic<std::int64_t> started_at{0};
  /// The event behind the work is recorded in its stream, so that other lanes can wait for it.
  std::atomic<bool> recorded{false};
  /// Guards `event` against its return to the pool while another lane waits for it. Also guards
  /// `waiting`, and `predecessors` while the part is `dropped`.
  mutable std::atomic_flag event_guard = ATOMIC_FLAG_INIT;
  event_view event;
  /// Other lanes that wait until this part is recorded or over.
  mutable std::vector<lane*> waiting;
  mutable std::atomic<bool> awaited{false}; ///< a lane was in `waiting`

  bool over() const noexcept {
    auto s = at.load(std::memory_order_acquire);
    return s == state::done || s == state::skipped || s == state::dropped;
  }
  bool dropped() const noexcept { return at.load(std::memory_order_acquire) == state::dropped; }
  /// Its operation is settled: a part that was dropped is over, and forgets its predecessors.
  void end_drop() noexcept;
  /// Returns whether both parts, if in flight on one lane at the same time, are in one stream, and
  /// so finish in order. False for `lend`: it finishes at once if nothing is before it. False for
  /// `overlap`: only the lane knows (`lane::is_before_in_stream`).
  bool shares_stream(const part& other) const noexcept {
    return on == other.on && stream == other.stream && in_lane_stream(stream) &&
           stream != stream_kind::lend && stream != stream_kind::overlap &&
           (stream != stream_kind::peer || peer == other.peer) &&
           (stream != stream_kind::collective || (tenant != nullptr && tenant == other.tenant));
  }
};

/// Returns whether the result was delivered to the requester of `p`, whatever happens to the other
/// parts of its operation.
inline bool is_delivered(const part& p) noexcept {
  return p.delivered.load(std::memory_order_acquire);
}

/// Returns whether the part, or what it had to follow, may be at work in a process that is lost
/// (`device_state::is_lost`). A stream of the lane then keeps no order between it and later parts.
bool is_lost(locked, const part& p) noexcept;

/// Returns whether a process that is lost may still write what `x` was to overwrite. The parts of
/// `x` may be over.
bool may_follow_lost_work(locked, const operation& x) noexcept;

/// The parts of an operation, aligned to cache lines. Aligned `new` would take ten times as long.
class part_list {
public:
  part_list(operation& of, std::size_t count)
      : room_(count == 0 ? nullptr : new std::byte[count * sizeof(part) + alignof(part) - 1]) {
    void* at = room_.get();
    auto space = count * sizeof(part) + alignof(part) - 1;
    auto* first = static_cast<part*>(std::align(alignof(part), sizeof(part), at, space));
    std::uninitialized_value_construct_n(first, count);
    parts_ = {first, count};
    for (std::size_t i = 0; i < count; ++i) {
      first[i].of = &of;
      first[i].index = i;
    }
  }
  ~part_list() { std::destroy(parts_.begin(), parts_.end()); }
  part_list(const part_list&) = delete;
  part_list& operator=(const part_list&) = delete;

  std::span<part> all() const noexcept { return parts_; }

private:
  std::unique_ptr<std::byte[]> room_;
  std::span<part> parts_;
};

/// Result of issuing a part.
enum class issue_outcome : std::uint8_t {
  enqueued, ///< the work is in the stream
  finished, ///< nothing is left to do
  continues ///< it is issued in pieces (`operation::proceed`); others may overtake it
};

/// An admitted operation. It is answered once: at the end, or immediately if it fails or its
/// deadline passes. It settles once: when no lane and no device uses it any more. Settling frees
/// its buffers and lets its successors settle.
class operation : public completion {
public:
  /// `verb` has static lifetime.
  operation(const char* verb, std::size_t parts);
  ~operation() override;

  const char* verb() const noexcept { return verb_; }
  std::uint64_t number() const noexcept override { return number_; }
  std::span<part> parts() noexcept { return parts_.all(); }
  std::span<const part> parts() const noexcept { return parts_.all(); }
  const std::vector<use>& uses() const noexcept { return uses_; }
  void expect_uses(std::size_t number) { uses_.reserve(number); }
  void add_use(use&& x) {
    auto& p = parts()[x.part];
    if (!p.uses_memory)
      p.uses_memory = true;
    if (p.uses_end == 0)
      p.uses_begin = static_cast<std::uint32_t>(uses_.size());
    uses_.push_back(std::move(x));
    p.uses_end = static_cast<std::uint32_t>(uses_.size());
  }
  /// Returns a range that contains the uses of `p`, perhaps among others. Empty once settled.
  std::span<const use> uses_of(const part& p) const noexcept {
    return p.uses_end <= uses_.size()
               ? std::span{uses_}.subspan(p.uses_begin, p.uses_end - p.uses_begin)
               : std::span<const use>{};
  }

  /// Marks the operation as a retry of request `number`: it may read ranges that only that request
  /// left skipped. Called before admission.
  void set_retry_of(std::uint64_t number) noexcept {
    for (auto& x : uses_)
      x.accepted = skipped_reads::of(number);
  }

  /// Makes the operation one of a step: the request is the run of the step, which has this number.
  /// Called before admission.
  void set_step(std::uint64_t number) noexcept { step_ = number; }
  /// Returns the number of the run of a step that it belongs to; 0: of none.
  std::uint64_t step() const noexcept { return step_; }
  /// Returns the number of its request: the run of a step, or the operation itself.
  std::uint64_t request_number() const noexcept { return step_ != 0 ? step_ : number(); }

  /// Makes the operation an attempt of the request of `x`, which may be made again after a loss.
  /// Called before admission.
  void set_retries(std::shared_ptr<retry_record> x) noexcept { retries_ = std::move(x); }
  /// Returns null if its request is not made again.
  retry_record* retries() const noexcept { return retries_.get(); }

  clock::time_point deadline = clock::time_point::max();
  /// The answer goes to a mailbox, so it must come before the actor system ends.
  std::atomic<bool> replies_to_actor{false};
  std::int64_t admitted_at = 0; // nanoseconds of `clock`
  /// Returns its position in the admission order; 0 before admission. Under the admission lock.
  std::uint64_t position() const noexcept { return position_; }

  /// @errors errc::cancelled becomes the answer
  void cancel() noexcept override;
  /// Ends the request early, because its deadline has passed.
  void expire() noexcept;
  /// Prevents all parts from being issued and answers with the error that `why` then returns.
  /// Returns false and does nothing if a lane has claimed a part, or if it has failed or settled.
  bool take_back(early_end how, const std::function<caf::error()>& why) noexcept;
  /// Fails and answers the operation and all readers of what it would have written. The first cause
  /// stays.
  void fail(const caf::error& cause) noexcept;

  bool settled() const noexcept { return stage_.load(std::memory_order_acquire) == stage::settled; }
  bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }
  /// Returns whether it was cancelled before any part was issued, and so counts as never made.
  bool cancelled() const noexcept {
    return withdrawal_.load(std::memory_order_acquire) == withdrawal::cancelled;
  }
  /// Returns true if it is certain that `p`, one of its parts, was not and never will be issued.
  bool never_issued(const part& p) const noexcept {
    auto at = p.at.load(std::memory_order_acquire);
    return withdrawn() || at == part::state::skipped || at == part::state::dropped;
  }
  /// Returns whether any operation of the process has failed and is not settled.
  static bool any_failing() noexcept { return failing_.load(std::memory_order_acquire) != 0; }
  /// Returns why it failed.
  caf::error cause() const;

  /// Returns a failure with `code`, verb, number and the parts' states.
  failure describe(errc code, std::string detail) const;
  /// Returns the error of a request whose deadline had passed when it was made.
  caf::error late() const;

  /// Returns the flight recorder's entry of `p`, without the part's times. On the lane of `p`.
  flight_entry record_of(const part& p) const noexcept;
  /// Returns the entries of all parts, on any thread; empty if the operation is settled.
  std::vector<flight_entry> open_records() const;

  // -- called by admission

  /// Returns false for the library's own work, to which a device's queue limit does not apply.
  virtual bool bounded() const noexcept { return true; }
  /// Returns whether the ranges that it would have written are skipped if it does not run. False
  /// for operations that write nothing themselves.
  virtual bool marks_skipped() const noexcept { return true; }
  /// Returns whether a part on another device's lane uses memory of `device`. If the operation has
  /// failed, a reset of `device` does not wait for its parts that are not issued.
  virtual bool borrows_from(int device) const noexcept {
    static_cast<void>(device);
    return false;
  }
  /// Returns false for operations that go on when all devices are lost.
  virtual bool needs_devices() const noexcept { return true; }
  /// Returns which threads make the rank calls that it waits for.
  virtual room_maker maker_of_calls(locked) const { return room_maker::others; }
  /// Checks what must hold before its buffers are checked, and again when it goes to the lanes
  /// after a wait.
  virtual caf::error on_check(locked) const { return {}; }
  /// Makes the last check before the operation gets its position in the order.
  virtual caf::error on_admit(locked, queue_bound) { return {}; }
  /// Undoes `on_admit`: another operation that was to be admitted with this one is refused.
  virtual void on_refuse(locked) noexcept {}
  /// Gives the operation its position in the order. `now`: nanoseconds of `clock`.
  void admitted(locked, std::int64_t now);
  /// Returns the position of the operation that was admitted last.
  static std::uint64_t last_position(locked) noexcept { return last_position_; }
  /// Returns whether it has a part that `is_lost`.
  bool has_lost_part(locked lock) const noexcept;
  /// Identifies what it waits for, except work on lanes; null: its parts may go to the lanes.
  virtual const void* waits_for(locked) const { return nullptr; }
  /// Notes that its parts go to the lanes.
  void submitted(locked lock);
  /// Returns how many bytes it moves; 0 if unknown.
  std::uint64_t size_bytes() const noexcept;
  bool on_lanes() const noexcept { return on_lanes_.load(std::memory_order_relaxed); }
  /// Makes `successor`, which uses what this writes, settle after this, and fail with it if it
  /// `reads`.
  void precede(const std::shared_ptr<operation>& successor, bool reads);
  /// Returns the operations that use what this writes and settle after it.
  std::vector<std::shared_ptr<operation>> successors() const;
  /// Returns whether it writes a byte that `other` writes.
  bool shares_written_bytes(const operation& other) const noexcept;
  /// Notes that a lost process may still write what it was to overwrite.
  void note_lost_before(locked) noexcept { behind_lost_ = true; }
  bool is_behind_lost(locked) const noexcept { return behind_lost_; }
  /// Notes that it will overwrite the indeterminate or skipped range `x`, or else marks it again.
  void overwrites(locked, const std::shared_ptr<buffer>& memory, const buffer::unreadable_range& x);
  /// Returns the ranges of `memory` in [begin, end) that were indeterminate or skipped and stay so,
  /// because it has failed and `p`, which was to overwrite them, is never issued. Empty once
  /// settled: then they are marked.
  std::vector<buffer::unreadable_range> unreadable_behind(locked, const buffer& memory,
                                                          const part& p, std::size_t begin,
                                                          std::size_t end) const;

  /// Withdraws the operation, which failed before it went to the lanes, from the admission order:
  /// operations in the order do not wait for it any more.
  void remove_from_order(locked lock) noexcept {
    removed_ = true;
    on_leave(lock);
  }
  bool is_removed() const noexcept { return removed_; }
  /// A dependent failure: `who` fails because another operation does not write what it reads.
  struct dependent_failure {
    std::shared_ptr<operation> who;
    caf::error cause;
  };
  /// Returns how many operations have failed so far before they went to the lanes. Each is counted
  /// before it is answered.
  static std::uint64_t failed_off_lanes() noexcept {
    return failed_off_lanes_.load(std::memory_order_acquire);
  }
  /// Marks again the indeterminate or skipped ranges that it was to overwrite.
  /// @returns whether there were any
  bool restore_unreadable(locked, std::vector<dependent_failure>& dependent_failures);
  /// After `remove_from_order`, marks what it would have written as skipped. Returns whether there
  /// is any.
  bool leave_skipped(locked, std::vector<dependent_failure>& dependent_failures);
  /// Marks what it would have written: it was refused with `why` and has no position in the order.
  void mark_refused(locked lock, const caf::error& why) const { mark_refused(lock, uses_, why); }
  /// The same for `uses`, which are not added to the operation yet.
  void mark_refused(locked, std::span<const use> uses, const caf::error& why) const;
  /// Adds the successors that were to read what it will never write.
  void add_readers(std::vector<dependent_failure>& dependent_failures) const;
  /// As `fail`, but adds the operations to `failed`; the caller answers them without the lock.
  void fail_unanswered(const caf::error& cause, std::vector<dependent_failure>& failed) noexcept;
  /// Lets the successors that are in the order settle without it.
  void let_successors_go(locked) noexcept;

  // -- called by lanes

  /// Makes what the issue of `p` needs. If it fails, the operation does not run. Only for
  /// operations with one part.
  virtual caf::error prepare(part&, lane&) { return {}; }
  /// Issues `p` on its lane's stream.
  virtual caf::expected<issue_outcome> issue(part& p, lane& on);
  /// Makes `event` that of the end of the work of `p`, which is the last in its stream.
  virtual caf::error mark_end(part& p, event_view event, stream_view stream,
                              backend_device& device);
  /// Returns whether its lane issues nothing else while a part `continues` there.
  virtual bool holds_lane() const noexcept { return false; }
  /// Issues more of a part that `continues`.
  virtual caf::expected<issue_outcome> proceed(part& p, lane& on);
  /// Returns whether other processes have parts of it, which they may issue without this process.
  virtual bool has_parts_elsewhere() const noexcept { return false; }
  /// Returns whether its parts write to memory of each other's devices. Then none of that is free
  /// before all of them are over.
  virtual bool writes_to_peers() const noexcept { return false; }
  /// Called when a part was issued and another never will be; `p` is the part that detected it. May
  /// be called twice. `why` is none if another part's failure is the reason.
  virtual void on_lost_part(part&, const caf::error& why) noexcept { static_cast<void>(why); }
  /// Returns the error of the operation if the work of `p` failed with `why` on its device.
  virtual caf::error on_failed_work(part& p, caf::error why) noexcept {
    static_cast<void>(p);
    return why;
  }
  /// Returns host memory that the streams may still access when the work is abandoned.
  virtual std::shared_ptr<void> used_by_streams() const noexcept { return nullptr; }
  /// Returns whether the work of `p`, which is done, has written the right result.
  virtual bool has_right_result(const part&) const noexcept { return true; }
  /// Called when the work of `p` is done on its device, before the part counts as over.
  virtual void on_part_done(part&) noexcept {}
  /// Called when no lane uses `p` any more, whether it was issued or not.
  virtual void on_part_over(part&) noexcept {}
  /// Returns whether the caller may issue `p`; if so, the operation cannot be withdrawn any more.
  bool claim_issue(part& p) noexcept;
  bool withdrawn() const noexcept {
    return withdrawal_.load(std::memory_order_acquire) >= withdrawal::done;
  }
  /// Notes that `p` is about to be issued. Returns false if another part is lost already. If one
  /// part is issued while another is lost, at least one of the two lanes sees the other. So no lane
  /// goes on with later parts before the communicator has ended.
  bool begin_issue(part& p) noexcept {
    p.begun.store(true);
    if (!lost_a_part())
      return true;
    take_back_issue(p);
    return false;
  }
  /// Undoes `begin_issue`: the part was not issued.
  static void take_back_issue(part& p) noexcept { p.begun.store(false); }
  bool any_issued() const noexcept;
  void part_lost(part& p, const caf::error& why) noexcept;
  bool lost_a_part() const noexcept { return lost_.load(); }
  /// Returns whether some part is never issued.
  bool is_placeholder() const noexcept { return has_placeholder_.load(std::memory_order_acquire); }
  /// Notes that `p` is never issued.
  void make_placeholder(part& p) noexcept;
  /// Decides that the operation succeeds if nothing but one part, whose work is done, is open.
  /// Nothing can fail it from then on. Returns whether it succeeds.
  bool succeed_if_last() noexcept { return open_.load(std::memory_order_acquire) == 1 && decide(); }
  /// Counts one part as over, and settles the operation after the last.
  void part_over() noexcept {
    if (one_over())
      settle();
  }
  /// The same without settling. If true, the caller must call `settle`.
  bool one_over() noexcept { return open_.fetch_sub(1, std::memory_order_acq_rel) == 1; }
  /// Returns whether all of it is over.
  bool over() const noexcept { return open_.load(std::memory_order_acquire) == 0; }
  /// Returns its reference to itself: the last owner, if no requester holds it any more.
  std::shared_ptr<operation> settle() noexcept;
  /// Notes that all work before `p` in its stream is done. The first part starts the stall limit.
  static void part_started(part& p, std::int64_t now) noexcept {
    if (p.started_at.load(std::memory_order_relaxed) == 0)
      p.started_at.store(now, std::memory_order_release);
  }

  // -- for the deadline_watch

  bool watched() const noexcept { return kept_by_.load(std::memory_order_acquire) != nullptr; }

  /// Returns the communicator that it runs on; null: none.
  virtual const void* communicator_key() const noexcept { return nullptr; }

  /// Limit for the work, in nanoseconds from the first start of a part; 0: no limit.
  std::int64_t stall_limit = 0;
  std::int64_t first_started_at() const noexcept;
  /// Called when the stall limit is over. Returns false if work with a limit of its own held it up:
  /// its stall limit then begins again.
  virtual bool on_stall() noexcept { return true; }

protected:
  /// Sets the verb of an operation that was made in advance.
  void begin(const char* verb) noexcept { verb_ = verb; }
  /// Takes the next operation number, as if it were made now.
  void draw_number() noexcept;
  /// Answers the request before its work is over.
  virtual void end_early(early_end how) noexcept;
  /// Returns the failure of a request that ends early.
  failure early_failure(early_end how) const;
  /// The same as an error that says what happens to the work. `runs_on`: a part of it is issued.
  caf::error early_answer(early_end how, bool runs_on) const;
  /// Called when its parts go to the lanes, where they may be issued.
  virtual void on_submit(locked) {}
  /// Called when it has left the order and will never run.
  virtual void on_leave(locked) noexcept {}
  /// Called when all parts are over and nothing failed: the result is complete.
  virtual void on_success() noexcept {}
  /// For `on_success`: returns the indeterminate or skipped ranges of `memory` that it overwrites.
  std::vector<buffer::unreadable_range> unreadable_before(const buffer& memory) const;
  /// Sets count and type of the elements that it moves or makes, for the flight record.
  void of_elements(std::uint64_t count, dtype type) noexcept {
    elements_ = count;
    element_type_ = static_cast<std::uint8_t>(type);
  }
  /// Adds what depends on the part or the verb. On the lane, or under the admission lock.
  virtual void describe_to(flight_entry&, const part&) const noexcept {}
  /// Called after the buffers are free, `failed` or not.
  virtual void on_settled() noexcept {}

private:
  friend class retired_operations;
  friend class deadline_watch; // which lists what it watches
  enum class withdrawal : std::uint8_t { none, tried, done, cancelled };
  /// `succeeds`: all work is done, so that nothing can make it fail any more.
  enum class stage : std::uint8_t { open, succeeds, settled };

  struct follower {
    std::shared_ptr<operation> who;
    bool reads;
  };
  struct overwritten_range {
    std::shared_ptr<buffer> memory;
    buffer::unreadable_range range;
  };

  bool withdraw(withdrawal as) noexcept;
  /// Under guard_. Returns whether it can neither fail nor be withdrawn: it has failed or succeeds.
  bool is_decided() const noexcept { return failed() || stage_.load() != stage::open; }
  /// Returns whether it succeeds. From then on it cannot fail.
  bool decide() noexcept;
  void count_stall_anew(std::int64_t now) noexcept {
    counted_from_.store(now, std::memory_order_release);
    stall_reported_ = false;
  }
  /// Under guard_.
  void note_cause(const caf::error& why, std::vector<std::shared_ptr<operation>>& readers) noexcept;
  bool set_cause(const caf::error& why, std::vector<std::shared_ptr<operation>>& readers) noexcept;

  std::vector<dependent_failure> mark_buffers(locked lock, const caf::error& cause,
                                              const std::vector<follower>& successors);
  std::uint64_t identity_of(const use& u) const noexcept {
    return u.accepted.identity(request_number());
  }
  static void mark_unreadable(locked lock, const std::shared_ptr<buffer>& memory,
                              const buffer::unreadable_range& x,
                              const std::vector<follower>& successors,
                              std::vector<dependent_failure>& dependent_failures);
  std::shared_ptr<operation> settle(std::vector<std::shared_ptr<operation>>& follow_up) noexcept;

  static std::atomic<std::size_t> failing_;
  static std::atomic<std::uint64_t> failed_off_lanes_;

  const char* verb_;
  std::uint64_t number_;
  std::uint64_t step_ = 0;
  bool behind_lost_ = false; // under the admission lock, as the next two
  static std::uint64_t last_position_;
  std::uint64_t position_ = 0;
  part_list parts_;
  // Members that lanes read, together.
  std::vector<use> uses_;
  std::atomic<bool> on_lanes_{false};
  std::atomic<withdrawal> withdrawal_{withdrawal::none};
  std::atomic<stage> stage_{stage::open};
  std::atomic<bool> failed_{false};
  std::atomic<bool> lost_{false};
  std::atomic<bool> has_placeholder_{false};
  std::atomic<std::uint32_t> open_;           // parts and predecessors that are not over
  std::atomic<std::int64_t> counted_from_{0}; // start of a restarted stall limit; 0: none
  std::uint64_t elements_ = 0;
  std::uint8_t element_type_ = flight_entry::no_type;
  std::shared_ptr<retry_record> retries_;
  bool removed_ = false;                       // under the admission lock, until it is on the lanes
  std::vector<overwritten_range> overwritten_; // under the admission lock
  mutable std::mutex guard_;                   // of cause_ and successors_
  caf::error cause_;
  std::vector<follower> successors_;
  std::shared_ptr<operation> self_; // set while lanes refer to the parts, or while it is retired
  operation* retired_before_ = nullptr;
  // links in the deadline watch's list of unsettled operations; under its lock
  operation* previous_ = nullptr;
  operation* next_ = nullptr;
  std::atomic<operation_watch*> kept_by_{nullptr};
  bool stall_reported_ = false;
};

/// Operations that one caller admits together, in their order.
using operation_batch = std::vector<std::shared_ptr<operation>>;

/// Result type of operations without a result.
struct nothing {};

/// An operation with a result.
template <class T> class operation_of : public operation {
public:
  using operation::operation;
  T value{};
};

/// Returns an operation without parts that is answered with `why`.
template <class T>
std::shared_ptr<operation_of<T>> refused_operation(const char* verb, caf::error why) {
  auto result = std::make_shared<operation_of<T>>(verb, 0);
  result->answer(std::move(why));
  return result;
}

} // namespace troupe::detail
