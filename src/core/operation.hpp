/// An admitted request: its parts on the lanes, who waits for it, and who comes after it.
#pragma once

#include "core/buffer.hpp"
#include "core/flight_ring.hpp"
#include "core/prefetch.hpp"
#include "core/room.hpp"
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
class timekeeper;

/// The streams of a lane. `collective`: one of several, each communicator's own while it has work
/// there. `peer`: one for each other device (`part::peer`), for copies over the link to it. `lend`:
/// for what waits until memory can be lent to another process. `none`: the part is over when its
/// issue returns. What is in `memory` waits for nothing: who allocates stands behind no kernel.
enum class stream_kind : std::uint8_t {
  compute,
  upload,
  download,
  memory,
  lend,
  collective,
  peer,
  none
};
inline constexpr std::size_t stream_count = 7;

/// A rank of a communicator, whose work on its lane is in one stream, in order; in another one,
/// perhaps, once all of it is over. @thread the lane
struct alignas(64) stream_tenant { // its lane changes it all the time, another one another's
  std::size_t stream = static_cast<std::size_t>(stream_kind::collective);
  std::size_t in_flight = 0; ///< or continuing
};

/// A range of memory that an operation uses.
struct use {
  std::shared_ptr<buffer> memory;
  std::size_t begin = 0; // bytes
  std::size_t end = 0;
  bool reads = false;
  bool writes = false;
  std::uint32_t part = 0; // index of the part that does it
  skipped_reads accepted = {};
};

/// Why a request is answered before its work is over. A cancelled one that was not issued is as if
/// it had never been made; one that expired leaves what it would have written skipped.
enum class early_end : std::uint8_t { cancelled, expired };

/// Work that must come first, on another stream or device; on the same stream, too, where `memory`
/// is another device's than its lane's: it outlives what the lane drops in a reset.
struct predecessor {
  std::shared_ptr<operation> of;
  const part* at;
  const buffer* memory; ///< that both use; there as long as the later one is not settled
};

/// What one device does for an operation. Its lane's words are its own: lanes that come to an
/// operation at once would wait for each other.
struct alignas(64) part {
  /// `skipped`: never issued, and what was before it is over, or stands in its stream. `dropped`:
  /// never issued, and what is behind it is behind its `predecessors`, which stay as they are then.
  enum class state : std::uint8_t { queued, issuing, issued, started, done, skipped, dropped };

  operation* of = nullptr;
  lane* on = nullptr;
  std::size_t index = 0;
  int rank = -1; ///< in a collective
  int peer = -1; ///< the other device (`stream_kind::peer`)
  stream_kind stream = stream_kind::compute;
  stream_tenant* tenant = nullptr;      ///< whose work it is, if a communicator's
  const stream_tenant* after = nullptr; ///< it comes behind all that is in flight of this one
  /// Issued behind the work of another tenant.
  std::atomic<bool> behind_others{false};
  bool uses_memory = false;
  /// All ranks issue it, and it waits for nothing but them; the lane's alone.
  bool certain = false;
  /// Its lane issues it whatever happens: others rely on that, and the device is lent for it.
  bool promised = false;
  bool awaited_by_all = false; ///< from the promise, or its vote, until it is issued
  bool passed_by = false;      ///< never issued; its event alone stands in the stream
  /// Over a link, and short: it goes there together with those that follow it at once.
  bool is_small_copy = false;
  bool shares_event = false; ///< that of one behind it in its stream, which gives it back
  /// Its own requester knows that it is done, whatever becomes of the others.
  std::atomic<bool> told{false};
  std::vector<predecessor> predecessors;
  const void* needs = nullptr; ///< what its issue looks at first, `needed_bytes`; the verb's
  /// Of the memory that it uses, if all of that is its lane's device's; 0: none was noted yet.
  std::uint64_t generation = 0;
  static constexpr std::uint64_t several_generations = UINT64_MAX;
  std::uint32_t uses_begin = 0; ///< its uses are among these (`operation::uses_of`)
  std::uint32_t uses_end = 0;
  part* next = nullptr;     // in the lane's inbox
  std::uint64_t record = 0; // in the lane's flight ring; the lane's alone

  std::atomic<state> at{state::queued};
  std::atomic<bool> claimed{false}; ///< its lane has come to it
  std::atomic<bool> begun{false};   ///< its call is made, or was
  /// In nanoseconds of `clock`; 0: all that is before it was not done yet.
  std::atomic<std::int64_t> started_at{0};
  /// The event that follows the work stands in its stream; others may wait for it.
  std::atomic<bool> recorded{false};
  /// Guards `event` against its return to the pool while another lane waits for it, `waiting`, and
  /// `predecessors` while it is `dropped`.
  mutable std::atomic_flag event_guard = ATOMIC_FLAG_INIT;
  event_view event;
  /// Other lanes that can do nothing before it is recorded or over.
  mutable std::vector<lane*> waiting;
  mutable std::atomic<bool> awaited{false}; ///< there were some

  /// What admission touches: the first bytes.
  static constexpr std::size_t placed_bytes = 128;
  static constexpr std::size_t needed_bytes = 128;

  bool over() const noexcept {
    auto s = at.load(std::memory_order_acquire);
    return s == state::done || s == state::skipped || s == state::dropped;
  }
  bool dropped() const noexcept { return at.load(std::memory_order_acquire) == state::dropped; }
  /// If both are in streams of one lane at once, it is the same stream, and what is first there
  /// ends first. (What is lent is done at once where nothing is before it.)
  bool shares_stream(const part& other) const noexcept {
    return on == other.on && stream == other.stream && stream != stream_kind::none &&
           stream != stream_kind::lend && (stream != stream_kind::peer || peer == other.peer) &&
           (stream != stream_kind::collective || (tenant != nullptr && tenant == other.tenant));
  }
};

/// An operation's parts, on lines of their own. The aligned form of `new` would take ten times as
/// long.
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

/// What became of a part when its lane issued it.
enum class issue_outcome : std::uint8_t {
  enqueued, ///< the stream has it
  finished, ///< nothing is left to do
  continues ///< it issues piece by piece (`operation::proceed`); others may pass it
};

/// How an operation that is admitted comes to its end: answered once, at once when it fails or its
/// time is over; settled once, when no lane and no device has anything to do with it any more.
/// Settling frees its buffers and lets those behind it settle.
class operation : public completion {
public:
  /// `verb` lives forever.
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
  /// Where the uses of `p` are, perhaps with others' among them. None once it is settled.
  std::span<const use> uses_of(const part& p) const noexcept {
    return p.uses_end <= uses_.size()
               ? std::span{uses_}.subspan(p.uses_begin, p.uses_end - p.uses_begin)
               : std::span<const use>{};
  }

  /// It is the request of that number, made again: it may read what that one left skipped. Before
  /// it is admitted.
  void set_retry_of(std::uint64_t number) noexcept {
    for (auto& x : uses_)
      x.accepted = skipped_reads::of(number);
  }

  clock::time_point deadline = clock::time_point::max();
  /// Its answer goes to a mailbox: it must come before the actor system ends.
  std::atomic<bool> replies_to_actor{false};
  std::int64_t admitted_at = 0; // nanoseconds of `clock`
  /// In the order; 0 before it is admitted. Under admission's lock.
  std::uint64_t place() const noexcept { return place_; }

  /// @errors errc::cancelled becomes the answer
  void cancel() noexcept override;
  /// Its deadline is over.
  void expire() noexcept;
  /// If nothing of it is issued, sees to it that nothing ever will be, and answers it with what
  /// `why` returns at that moment. Returns false if something is issued.
  bool take_back(early_end how, const std::function<caf::error()>& why) noexcept;
  /// It failed: answers it and all that build on what it would have written. The first cause stays.
  void fail(const caf::error& cause) noexcept;

  bool settled() const noexcept { return settled_.load(std::memory_order_acquire); }
  bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }
  /// It was cancelled before anything of it was issued, and is as if it had never been made.
  bool cancelled() const noexcept {
    return withdrawal_.load(std::memory_order_acquire) == withdrawal::cancelled;
  }
  /// Is it certain that `p`, one of its parts, was not issued and never will be?
  bool never_issued(const part& p) const noexcept {
    auto at = p.at.load(std::memory_order_acquire);
    return withdrawn() || at == part::state::skipped || at == part::state::dropped;
  }
  /// Is there any that failed and is not settled?
  static bool any_failing() noexcept { return failing_.load(std::memory_order_acquire) != 0; }
  /// Why it failed.
  caf::error cause() const;

  /// `code` with verb, number and the parts' states.
  failure describe(errc code, std::string detail) const;
  /// The error of a request whose deadline was over when it was made.
  caf::error late() const;

  /// What the flight recorder says of `p`, without its times. On the lane of `p`.
  flight_entry record_of(const part& p) const noexcept;
  /// The same of all parts, on any thread; none if it is settled.
  std::vector<flight_entry> open_records() const;

  // -- called by admission, under its lock

  /// Brings what the place of `x` changes, but for its parts and what a verb has, into the cache of
  /// the calling thread. It may be gone: it is not looked at.
  static void fetch_place(const operation* x) noexcept {
    prefetch_members_to_change(x->deadline, x->open_);
    prefetch_members_to_change(x->self_, x->kept_by_);
  }
  /// False for the library's own work, for which the bound of what waits for a device does not
  /// count.
  virtual bool bounded() const noexcept { return true; }
  /// Is what it would have written skipped if it does not run? False for what writes nothing by
  /// itself.
  virtual bool marks_skipped() const noexcept { return true; }
  /// Does a part of it use memory of a device on another one's lane? If it has failed, a reset of
  /// that device does not wait for its parts that are not issued.
  virtual bool borrows_from(int device) const noexcept {
    static_cast<void>(device);
    return false;
  }
  /// False for what goes on when everything ends.
  virtual bool needs_devices() const noexcept { return true; }
  /// Returns which threads make the ranks' calls that it waits for. Under admission's lock.
  virtual room_maker maker_of_calls() const { return room_maker::others; }
  /// What must be right before its buffers are looked at, and again when it comes to the lanes
  /// after a wait.
  virtual caf::error on_check() const { return {}; }
  /// The last check before it gets its place.
  virtual caf::error on_admit(queue_bound) { return {}; }
  /// It has its place in the order.
  void admitted(std::int64_t now);
  /// Names what it waits for, if that is no work on a lane; null: its parts may go to the lanes.
  virtual const void* waits_for() const { return nullptr; }
  /// Its parts go to the lanes now.
  void submitted();
  /// How much it moves; 0 if it said nothing of that.
  std::uint64_t size_bytes() const noexcept;
  bool on_lanes() const noexcept { return on_lanes_.load(std::memory_order_relaxed); }
  /// `successor` uses what this writes: it settles after this, and if it `reads` it fails when this
  /// fails.
  void precede(const std::shared_ptr<operation>& successor, bool reads);
  /// It will heal `x`; if it never runs, the wound is there again.
  void heals(const std::shared_ptr<buffer>& memory, const buffer::wound& x);

  /// It failed before it came to the lanes, and gives its place up: what is still in the order does
  /// not come behind it any more.
  void leave_order() noexcept {
    left_order_ = true;
    on_leave();
  }
  bool left_order() const noexcept { return left_order_; }
  /// Who fails because of what another operation does not do.
  struct casualty {
    std::shared_ptr<operation> who;
    caf::error cause;
  };
  /// How many have failed so far that were not on the lanes. One is counted before it is answered.
  static std::uint64_t failed_off_lanes() noexcept {
    return failed_off_lanes_.load(std::memory_order_acquire);
  }
  /// The wounds that it was to heal are there again. @returns whether there were any
  bool return_wounds(std::vector<casualty>& casualties);
  /// Marks what it would have written as skipped, after `leave_order`. Returns whether there is
  /// any.
  bool leave_skipped(std::vector<casualty>& casualties);
  /// It was refused with `why`, and has no place in the order: marks what it would have written.
  void mark_refused(const caf::error& why) const { mark_refused(uses_, why); }
  /// The same for `uses`, which it has not taken yet.
  void mark_refused(std::span<const use> uses, const caf::error& why) const;
  /// Those that were to read what it will never write.
  void add_readers(std::vector<casualty>& casualties) const;
  /// As `fail`, but those that fail are still to be answered, without the lock.
  void fail_unanswered(const caf::error& cause, std::vector<casualty>& failed) noexcept;
  /// What is in the order settles without it.
  void let_successors_go() noexcept;

  // -- called by lanes

  /// Brings what the issue of `p` needs into the cache of the calling thread. All of it may be
  /// gone: none is looked at.
  static void prefetch(const part* p, const operation* of, const void* needs) noexcept {
    prefetch_lines_to_change(p, sizeof *p);
    prefetch_lines(needs, part::needed_bytes);
    __builtin_prefetch(of);
    // With what lanes ask before they issue; and what a verb has first.
    constexpr std::size_t firsts = 96;
    prefetch_lines(&of->uses_, sizeof(of->uses_) + firsts);
    prefetch_lines(of + 1, firsts);
  }
  static void prefetch(const part& p) noexcept { prefetch(&p, p.of, p.needs); }
  /// Issues `p` on its lane's stream.
  virtual caf::expected<issue_outcome> issue(part& p, lane& on);
  /// Nothing else is issued on a lane while a part of it `continues` there.
  virtual bool holds_lane() const noexcept { return false; }
  /// Work of kernels is to pass a part that `continues`: false if that comes first, at once.
  virtual bool lets_pass() noexcept { return true; }
  /// Goes on with a part that `continues`.
  virtual caf::expected<issue_outcome> proceed(part& p, lane& on);
  /// Are there parts of it in other processes, where they may be issued without this one?
  virtual bool has_parts_elsewhere() const noexcept { return false; }
  /// A part was issued and another never will be; `p` is the one that saw it. May be called twice.
  /// `why` is none if another part's failure is the reason.
  virtual void on_lost_part(part&, const caf::error& why) noexcept { static_cast<void>(why); }
  /// What it is told if the work of `p` failed with `why` on its device.
  virtual caf::error on_failed_work(part& p, caf::error why) noexcept {
    static_cast<void>(p);
    return why;
  }
  /// Host memory that the streams may still touch when the work is given up in the middle.
  virtual std::shared_ptr<void> used_by_streams() const noexcept { return nullptr; }
  /// Brings what the answer, or that of `p`, needs into the cache of the calling thread.
  virtual void fetch_answer(const part&) const noexcept {
    prefetch_to_change(this);
    prefetch_to_change(&deadline); // and the end of the completion
  }
  /// The work of `p` is over on its device; before it counts as over.
  virtual void on_part_done(part&) noexcept {}
  /// No lane has anything to do with `p` any more, whatever became of it.
  virtual void on_part_over(part&) noexcept {}
  /// True if the caller may issue `p`: from the first time on the operation cannot be withdrawn.
  bool claim_issue(part& p) noexcept;
  bool withdrawn() const noexcept {
    return withdrawal_.load(std::memory_order_acquire) >= withdrawal::done;
  }
  /// Notes that `p` is issued, before it is; false if another part is lost already. Where one is
  /// issued while another is lost, at least one of them sees the other: no lane goes on with what
  /// comes behind before the communicator has ended.
  bool begin_issue(part& p) noexcept {
    p.begun.store(true);
    if (!lost_a_part())
      return true;
    take_back_issue(p);
    return false;
  }
  /// It was not issued.
  static void take_back_issue(part& p) noexcept { p.begun.store(false); }
  bool any_issued() const noexcept;
  void part_lost(part& p, const caf::error& why) noexcept;
  bool lost_a_part() const noexcept { return lost_.load(); }
  /// Whoever asked for `p`, one of its parts, knows that it is done.
  bool told(const part& p) const noexcept {
    return all_told_.load(std::memory_order_acquire) || p.told.load(std::memory_order_acquire);
  }
  /// Was a part never issued?
  bool passed_by() const noexcept { return passed_by_.load(std::memory_order_acquire); }
  /// `p` never will be.
  void pass_by(part& p) noexcept;
  /// A part is over.
  void part_over() noexcept {
    if (one_over())
      settle();
  }
  /// The same; true: nothing is left but to `settle` it.
  bool one_over() noexcept { return open_.fetch_sub(1, std::memory_order_acq_rel) == 1; }
  /// Is all of it over?
  bool over() const noexcept { return open_.load(std::memory_order_acquire) == 0; }
  /// All of it is over: gives the answer, if nobody minds that it is settled only later.
  virtual bool answer_ahead() noexcept { return false; }
  /// Returns what kept it until now: the last owner, if no requester has it any more.
  std::shared_ptr<operation> settle() noexcept;
  /// All before `p` is done on its stream. First of all parts: the stall limit starts to count.
  static void part_started(part& p, std::int64_t now) noexcept {
    if (p.started_at.load(std::memory_order_relaxed) == 0)
      p.started_at.store(now, std::memory_order_release);
  }

  // -- the timekeeper's

  bool watched() const noexcept { return kept_by_.load(std::memory_order_acquire) != nullptr; }

  /// The communicator that it runs on, if any.
  virtual const void* communicator_key() const noexcept { return nullptr; }

  /// Nanoseconds that the work may take from its first start on; 0: no limit.
  std::int64_t stall_limit = 0;
  std::int64_t first_started_at() const noexcept;
  /// The stall limit is over. False: it was held up by what has a limit of its own, and its limit
  /// counts anew.
  virtual bool on_stall() noexcept { return true; }

protected:
  /// Made before anybody asked for it: now it is `verb`.
  void begin(const char* verb) noexcept { verb_ = verb; }
  /// Takes the next number, as if it were made now.
  void draw_number() noexcept;
  /// Answers it before its work is over.
  virtual void end_early(early_end how) noexcept;
  /// Why a request ends early.
  failure early_failure(early_end how) const;
  /// The same with what becomes of it. `runs_on`: something of it is issued.
  caf::error early_answer(early_end how, bool runs_on) const;
  /// Under admission's lock: its parts go to the lanes now, and may be issued.
  virtual void on_submit() {}
  /// Under admission's lock: it gave its place up, and will never run.
  virtual void on_leave() noexcept {}
  /// All parts are over and nothing failed: the result is complete.
  virtual void on_success() noexcept {}
  /// Whoever asked for it knows that all of it is done.
  void tell_all(bool told) noexcept { all_told_.store(told, std::memory_order_release); }
  /// What was half-written of `memory` before it, where it writes. In `on_success`.
  std::vector<buffer::wound> half_written_before(const buffer& memory) const;
  /// For the record: what it moves or makes.
  void of_elements(std::uint64_t count, dtype type) noexcept {
    elements_ = count;
    element_type_ = static_cast<std::uint8_t>(type);
  }
  /// The same where the parts differ, and what only the verb knows; on the lane, or under the lock
  /// of the order.
  virtual void describe_to(flight_entry&, const part&) const noexcept {}
  bool has_successors() const noexcept;
  /// After the buffers are free; `failed` or not.
  virtual void on_settled() noexcept {}

private:
  friend class retired_operations;
  friend class timekeeper;
  enum class withdrawal : std::uint8_t { none, tried, done, cancelled };

  struct follower {
    std::shared_ptr<operation> who;
    bool reads;
  };
  struct healed_wound {
    std::shared_ptr<buffer> memory;
    buffer::wound wound;
  };

  bool withdraw(withdrawal as) noexcept;
  void count_stall_anew(std::int64_t now) noexcept {
    counted_from_.store(now, std::memory_order_release);
    stall_told_ = false;
  }
  /// Under guard_.
  void note_cause(const caf::error& why, std::vector<std::shared_ptr<operation>>& readers) noexcept;
  bool set_cause(const caf::error& why, std::vector<std::shared_ptr<operation>>& readers) noexcept;

  std::vector<casualty> wound_buffers(const caf::error& cause,
                                      const std::vector<follower>& successors);
  std::uint64_t identity_of(const use& u) const noexcept { return u.accepted.identity(number()); }
  static void wound(const std::shared_ptr<buffer>& memory, const buffer::wound& x,
                    const std::vector<follower>& successors, std::vector<casualty>& casualties);
  std::shared_ptr<operation> settle(std::vector<std::shared_ptr<operation>>& follow_up) noexcept;

  static std::atomic<std::size_t> failing_;
  static std::atomic<std::uint64_t> failed_off_lanes_;

  const char* verb_;
  std::uint64_t number_;
  std::uint64_t place_ = 0;
  part_list parts_;
  // What lanes look at, together.
  std::vector<use> uses_;
  std::atomic<bool> on_lanes_{false};
  std::atomic<withdrawal> withdrawal_{withdrawal::none};
  std::atomic<bool> settled_{false};
  std::atomic<bool> failed_{false};
  std::atomic<bool> lost_{false};
  std::atomic<bool> all_told_{false};
  std::atomic<bool> passed_by_{false};
  std::atomic<std::uint32_t> open_;           // parts and predecessors that are not over
  std::atomic<std::int64_t> counted_from_{0}; // if its stall limit counts anew
  std::uint64_t elements_ = 0;
  std::uint8_t element_type_ = flight_entry::no_type;
  bool left_order_ = false;          // under admission's lock, until it is on the lanes
  std::vector<healed_wound> healed_; // under admission's lock
  mutable std::mutex guard_;         // of the three below
  caf::error cause_;
  std::vector<follower> successors_;
  std::shared_ptr<operation> self_; // while lanes refer to the parts, or it is retired
  operation* retired_before_ = nullptr;
  // the timekeeper's, under its lock: its list of what is not settled
  operation* previous_ = nullptr;
  operation* next_ = nullptr;
  std::atomic<timekeeper*> kept_by_{nullptr};
  bool stall_told_ = false;
};

/// An operation with a result.
template <class T> class operation_of : public operation {
public:
  using operation::operation;
  T value{};
};

/// A request that was refused.
template <class T>
std::shared_ptr<operation_of<T>> refused_operation(const char* verb, caf::error why) {
  auto result = std::make_shared<operation_of<T>>(verb, 0);
  result->answer(std::move(why));
  return result;
}

} // namespace troupe::detail
