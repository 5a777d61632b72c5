/// The one thread that issues all GPU work of a device, in admission order, and polls its
/// completions.
#pragma once

#include "foundation/fair_limit.hpp"
#include "lane/stream_table.hpp"
#include "operation/device_state.hpp"
#include "operation/flight_ring.hpp"
#include "operation/library_states.hpp"
#include "operation/operation.hpp"
#include "operation/room.hpp"
#include <troupe/backend.hpp>
#include <troupe/runtime_options.hpp>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <unordered_set>
#include <vector>

namespace troupe::detail {

class stager;
class staging_ring;
class pinned_words;

/// The work of a process that had a device and is lost. It may use the device's memory, if that is
/// kept, and memory of other devices.
struct lost_process {
  std::uint64_t until = 0;              ///< as `device_state::lost_until`
  std::function<bool()> work_is_over{}; ///< as `backend_device::lost_work`
  std::vector<part*> parts{};           ///< were in its streams; the lane is done with them

  /// Ends the parts, when the work is over or nothing depends on it. @thread any
  void end() noexcept;
};

/// Is told of lane events that concern more than one operation. @thread the lane
class lane_owner {
public:
  virtual ~lane_owner() = default;
  /// Called on a sticky fault: CUDA cannot be used in this process any more. Returns the error with
  /// which all requests complete: the first fault that any lane saw.
  virtual caf::error on_fault(lane& where, const caf::error& why) noexcept = 0;
  /// Called when the device could not be opened, the first time or again. Its state is closed.
  virtual void on_device_failed(lane& where, const caf::error& why) noexcept = 0;
  /// Called when a process that had the device is gone, perhaps late. @thread any
  virtual void on_device_lost(lane& where) noexcept = 0;
  /// Called when the device is ready again after that, or has failed.
  virtual void on_device_back(lane& where) noexcept = 0;
  /// Called before that if its memory could not be kept. Its state is closed.
  virtual void on_memory_lost(lane& where, const caf::error& why) noexcept = 0;
  /// Does a job that takes long, on another thread.
  virtual void run_later(std::function<void()> job) = 0;
  /// Called with the work of a lost process, to end it. `why`: the error of its operations
  virtual void on_lost_process(lane& where, lost_process x, const caf::error& why) noexcept = 0;
  /// Called once for each `lane::request_move`. After an error the device is not on its spare,
  /// unless it was lost: then the error is the loss.
  virtual void on_moved(lane& where, const caf::error& why) noexcept = 0;
};

/// @thread client functions: any; functions for operations: the lane itself
class lane : public std::enable_shared_from_this<lane> {
public:
  /// `owner` outlives the lane's thread.
  lane(std::shared_ptr<device_state> state, std::unique_ptr<backend_device> device,
       const lane_options& options, lane_owner& owner);
  ~lane();

  // -- for clients

  /// @errors errc::unavailable: the system has no thread for it
  caf::error start();
  device_state& state() const noexcept { return *state_; }
  const std::shared_ptr<device_state>& shared_state() const noexcept { return state_; }

  /// Returns whether there is room for one more part.
  bool accepts(locked, queue_bound bound) const noexcept {
    return queued() < limit_of(options_.queue_limit, bound);
  }
  std::size_t queue_limit() const noexcept { return options_.queue_limit; }
  /// Counts a part that has its position and will be submitted.
  void expect_part(locked) noexcept {
    set(expected_, expected_.load(std::memory_order_relaxed) + 1);
  }
  /// Takes `p`, which is on this lane, as the next in order. Returns false if `p` is never issued
  /// and the lane will not get to it soon: the lane has ended, or waits for its device to come
  /// back. `wake_to_work` follows.
  bool submit(locked, part& p) noexcept;
  /// Returns whether the device is lost, and not open again yet, or is handed over to its spare.
  /// Operations that have parts on the lane are held until then: after a loss they could not be
  /// dropped on the lane, and work of a handed over device has to end.
  bool is_away(locked) const noexcept { return away_; }
  /// Notes that the device is lost or handed over, after the operation with this position was
  /// admitted. Returns the position of the first such note since it was there.
  std::uint64_t go_away(locked, std::uint64_t position) noexcept {
    if (!away_.exchange(true))
      away_since_ = position;
    return away_since_;
  }
  /// Wakes the lanes of all `parts`, which were submitted, if they sleep.
  static void wake_to_work(std::span<const part> parts) noexcept;
  void wake() noexcept;
  /// Wakes the lanes of all `parts`. Signals all of them first, so that they look into each other's
  /// words at once, not one by one.
  static void wake(std::span<const part> parts) noexcept;

  /// As `backend_device::loss`.
  caf::error loss(locked) const noexcept { return closed_ ? caf::error{} : device_->loss(); }
  /// As `backend_device::may_keep_memory`.
  bool may_keep_memory(locked, const caf::error& loss) const noexcept {
    return !closed_ && device_->may_keep_memory(loss);
  }
  /// As `backend_device::is_remote`.
  bool is_remote() const noexcept { return is_remote_; }
  /// As `backend_device::runs_cuda`.
  bool runs_cuda() const noexcept { return runs_cuda_; }

  std::size_t in_flight() const noexcept { return in_flight_.load(std::memory_order_relaxed); }
  /// Returns whether work of the lane may be running on the device.
  bool at_work() const noexcept { return issuing_.load() || in_flight_.load() != 0; }
  /// Returns a count that increases at the beginning and at the end of each round over all work.
  std::uint64_t looks() const noexcept { return looks_.load(std::memory_order_acquire); }
  /// Returns the least count after a complete round that begins from now on.
  std::uint64_t whole_look() const noexcept {
    const auto now = looks();
    return now + (now % 2 == 0 ? 2 : 3);
  }
  /// Returns how many parts are still to be issued.
  std::size_t queued() const noexcept {
    auto left = left_.load(std::memory_order_acquire); // first: it never exceeds the other
    return expected_.load(std::memory_order_relaxed) - left;
  }
  /// Frees the memory of this generation once nothing is in flight, makes a new one, and publishes
  /// it. The state was closed before, and the operations that used the memory were failed.
  void request_reset() noexcept;
  /// Drops the work on a lost device, opens the device again, and publishes it. The state was
  /// closed before, and the operations that used the device were failed.
  void request_revival() noexcept;
  /// Moves the device to its spare once the lane has no more parts. It is away, so no part comes
  /// meanwhile. Nothing but the lane uses its process any more.
  void request_move() noexcept;
  /// Frees everything once nothing is in flight, and ends the thread. The state was closed before.
  void request_stop() noexcept;
  /// Waits for the thread to end. Returns false if it did not end in time: it is abandoned, and
  /// keeps its resources.
  bool join_within(fair_limit& limit) noexcept;
  /// Drops all work without another call to CUDA, which cannot be used in this process any more.
  void abandon() noexcept;

  /// Returns whether the lane is in a call on `communicator`, or about to enter one.
  bool is_inside(const void* communicator) const noexcept { return inside_.load() == communicator; }
  /// Returns when the call that issues the present, or last, part began; in nanoseconds of `clock`.
  std::int64_t issuing_since() const noexcept {
    return issuing_since_.load(std::memory_order_relaxed);
  }
  /// Returns the record of its last operations, without the one that it is issuing.
  const flight_log& record() const noexcept { return record_; }

  /// Marks the lane as inside a communicator. Call `leave` after the call.
  void enter(const void* communicator) noexcept { inside_.store(communicator); }
  void leave() noexcept { inside_.store(nullptr); }

  /// Returns an event behind the work that is in `user`, a stream of the caller.
  /// @errors errc::unavailable: the lane has ended
  caf::expected<user_event> mark_user(stream_view user) noexcept;

  /// Counts a communicator that has a rank on this lane.
  void add_tenant() noexcept { tenants_.fetch_add(1, std::memory_order_relaxed); }
  void remove_tenant() noexcept { tenants_.fetch_sub(1, std::memory_order_relaxed); }

  /// Returns whether an operation holds the lane (`operation::holds_lane`): queued parts wait.
  bool held() const noexcept { return held_.load(std::memory_order_relaxed); }
  /// Returns whether a call that connects a communicator blocks the lane now, or did after `since`.
  bool connected_after(std::int64_t since) const noexcept {
    return connecting_until_.load(std::memory_order_relaxed) > since;
  }

  // -- for operations

  backend_device& device() noexcept { return *device_; }
  /// Returns the device for owners that give resources back to it after the lane has ended.
  std::shared_ptr<backend_device> shared_device() const noexcept { return device_; }
  /// For kinds with one stream per lane.
  stream_view stream(stream_kind kind) const noexcept { return streams_.stream_of(kind).stream; }
  /// Returns the stream of `p`, which is being issued.
  stream_view stream(const part& p) const noexcept { return streams_.stream_of(p).stream; }
  /// Makes more streams, if possible, so that each communicator can have its own.
  caf::error provide_streams();
  /// Makes the stream for the link to `peer` if there is none.
  caf::error provide_peer_stream(int peer);
  /// Returns whether all work of communicators is over, except work that has failed.
  bool collectives_over() const noexcept;
  /// Returns whether all work that must come before `p` is over, or before it in a shared stream.
  static bool nothing_before(const part& p) noexcept;
  /// Called before and after a call that connects a communicator.
  void begin_connecting() noexcept;
  void end_connecting() noexcept;
  const device_properties& properties() const noexcept { return properties_; }
  staging_ring& upload_ring() noexcept { return *upload_ring_; }
  staging_ring& download_ring() noexcept { return *download_ring_; }
  stager& copier() noexcept { return *stager_; }
  /// The states of libraries for a device of this process.
  library_states& libraries() noexcept { return libraries_; }
  /// Returns how often a workspace has changed (`library_states::workspace_changes`), wherever the
  /// device is.
  std::uint64_t workspace_changes() const noexcept {
    return libraries_.workspace_changes() + device_->workspace_changes();
  }
  /// Returns a word for work to write to. The owner keeps it until no work writes to it.
  caf::expected<std::shared_ptr<std::int32_t>> take_word();
  /// Up to this size a copy over NVLink takes less time than the calls that issue it.
  static constexpr std::size_t small_copy_bytes = std::size_t{256} << 10;
  /// Issues `what`, a copy of `p`: at once, or together with the small copies that follow it.
  caf::error copy_over_link(part& p, const peer_copy& what);
  /// Records an event at this point of `kind`'s stream and returns it; `retire` gives it back.
  caf::expected<event_view> mark(stream_kind kind) { return mark(stream(kind)); }
  caf::expected<event_view> mark(stream_view stream) {
    return mark([&](event_view event) { return device_->record(event, stream); });
  }
  void retire(event_view event) noexcept;
  /// Ends a part of a lost process. @thread any
  static void end_lost(part& p) noexcept;
  /// Notes that the event of `p` is recorded behind the work of `p`: other parts may wait for it.
  static void set_recorded(part& p) noexcept;
  /// Notes that `p` is never issued. Where `p` would have kept an order on memory of other devices,
  /// whose streams go on, that order remains (`part::state::dropped`).
  static void set_skipped(part& p) noexcept;
  /// Makes `stream` wait for the predecessors of `p`.
  caf::error wait_for_predecessors(part& p, stream_view stream);
  /// Returns whether `x` is neither recorded nor over. If so, the lane of `x` will wake this one.
  bool must_await(const part& x) noexcept;
  /// Makes `stream` wait for `x`, which is recorded or over.
  caf::error wait_for(const part& x, stream_view stream);

private:
  /// Small copies that follow one another in the stream of a link. They are issued in one call,
  /// unless they depend on each other, with one event behind all.
  struct copy_run {
    lane_stream* in = nullptr; ///< null: there is no run
    std::size_t parts = 0;     ///< the run is the last `parts` in flight there
    std::vector<peer_copy> copies;
    std::vector<part*> owners; ///< one for each copy
    bool goes_apart = false;   ///< each copy in a call of its own
  };
  enum class verdict : std::uint8_t { held, gone };

  // The thread, and errors of calls into the backend (lane.cpp).
  void run() noexcept;
  bool ends_now() noexcept;
  bool has_input() const noexcept;
  bool take_inbox() noexcept;
  bool nothing_continues() const noexcept;
  bool nothing_in_flight() const noexcept;
  /// Returns whether the lane spins in short waits.
  bool may_spin() const noexcept {
    return options_.spin->count() != 0 && options_.completion == completion_strategy::event_poll;
  }
  void idle();
  void notify() noexcept;
  bool is_lost() const noexcept;
  bool owner_tells(const caf::error& error) const noexcept;
  caf::error note(const caf::error& error) noexcept;
  caf::error note_fault(const caf::error& error) noexcept;
  caf::error in_full(const part& p, const caf::error& error) const;
  static std::int64_t nanoseconds(clock::time_point x) { return x.time_since_epoch().count(); }
  static void set(std::atomic<std::size_t>& count, std::size_t x) noexcept {
    count.store(x, std::memory_order_release); // there is one writer at a time
  }

  // The device (lane_device.cpp).
  bool come_up();
  caf::error open_device();
  caf::error open_memory();
  void go_down() noexcept;
  bool serve_control();
  bool has_lost_work() const noexcept;
  void reset_now();
  void publish();
  std::vector<part*> take_from_streams(const caf::error& why) noexcept;
  void leave_to_lost_process(const caf::error& why) noexcept;
  void leave_nothing() noexcept;
  std::unordered_set<const part*> known_done() noexcept;
  bool is_known_done(const part& p) noexcept;
  caf::error take_over_memory();
  void revive();
  bool keeps_memory() const noexcept { return state_->live_generation() != 0; }
  void leave_words();
  std::vector<std::unique_ptr<staging_ring>> leave_rings();
  bool serve_move();
  caf::error move_now();
  void stay();
  void forget(const std::vector<event_view>& events) noexcept;
  void give_up_device() noexcept;
  bool drain_released();
  void abandon_now() noexcept;
  /// Makes the stream of `p`, if most lanes do not need it.
  caf::error provide_stream_of(const part& p);
  /// Makes a stream that most lanes do not need.
  caf::error provide_late(std::size_t index);

  // Issuing parts (lane_issue.cpp).
  bool issue_ready();
  bool drop_failed() noexcept;
  bool is_held() noexcept;
  verdict try_issue(part& p);
  bool prepare(part& p);
  void choose_stream(part& p);
  std::size_t stream_for_overlap(const part& p);
  caf::error check_generation(const part& p) const;
  verdict wait_for_owner(part& p);
  void after_issue(part& p, const caf::expected<issue_outcome>& outcome);
  void put_in_flight(part& p);
  bool proceed_continuing();
  void skip(part& p) noexcept;
  void lose(part& p, const caf::error& why) noexcept;
  /// Counts a part that is issued, or never will be.
  void note_left() noexcept { set(left_, left_.load(std::memory_order_relaxed) + 1); }

  // Small copies over links (lane_copies.cpp).
  static void note_copy(lane_stream& s, const part& p) noexcept;
  bool run_goes_on_after(const part& p) const noexcept;
  bool joins_run(const part& p) const noexcept;
  void end_run();
  void issue_run(stream_view stream);
  void issue_apart();
  void mark_last(lane_stream& s, std::size_t parts);

  // Predecessors (lane_predecessors.cpp).
  std::optional<std::uint64_t> held_by(part& p) noexcept;
  static void see_through_dropped(part& p);
  static void wake_waiting(const part& x) noexcept;
  static event_view set_over(part& p) noexcept;
  static void settle_if_over(part& p) noexcept;
  bool stands_between(const part& p) const noexcept;
  bool is_before_in_stream(const part& x, const part& p) const noexcept;
  caf::error wait_for_what_is_before(part& p);

  /// Gives an event to `record`, and returns it.
  template <class F> caf::expected<event_view> mark(F record) {
    auto event = take_event();
    if (event)
      if (auto error = record(*event)) {
        retire(*event);
        return error;
      }
    return event;
  }
  caf::expected<event_view> take_event();

  // Completion (lane_completion.cpp).
  void note_started(lane_stream& s) noexcept;
  bool poll();
  bool poll(lane_stream& s);
  bool poll_each(lane_stream& s);
  std::size_t finish_first(lane_stream& s, std::size_t count, event_view event) noexcept;
  void leave_flight(part& p) noexcept;
  void finish(part& p, std::int64_t now) noexcept;

  const std::shared_ptr<device_state> state_;
  std::vector<std::shared_ptr<void>> given_up_; // objects that the device's streams may still use
  std::shared_ptr<backend_device> device_; // until the lane ends: then another owner may open it
  const bool runs_cuda_;
  const bool is_remote_;
  const lane_options options_;
  lane_owner& owner_;
  device_properties properties_;
  stream_table streams_;
  std::size_t continuing_ = 0;     // how many streams have a part that continues
  std::vector<event_view> events_; // free ones
  std::unique_ptr<staging_ring> upload_ring_;
  std::unique_ptr<staging_ring> download_ring_;
  std::unique_ptr<stager> stager_;
  library_states libraries_;
  std::shared_ptr<pinned_words> words_; // the one that has room; null: none was needed yet
  std::deque<part*> waiting_;
  copy_run run_; // used while parts are issued, one after the other

  // Words that clients change, apart from the lane's own. An idle lane polls the first cache line.
  alignas(64) std::atomic<part*> inbox_{nullptr};
  std::atomic<bool> signalled_{false};
  std::atomic<bool> parked_{false};
  bool closed_ = false; // no thread takes parts from the inbox any more; under the admission lock
  /// As `is_away`. The lane reads it without the lock.
  std::atomic<bool> away_{false};
  std::uint64_t away_since_ = 0;                     // under the admission lock
  alignas(64) std::atomic<std::size_t> expected_{0}; // parts; under the admission lock

  alignas(64) std::atomic<std::size_t> in_flight_{0};
  std::atomic<std::size_t> left_{0}; // parts that are issued, or never will be
  std::atomic<bool> issuing_{false}; // or a part continues
  std::atomic<std::int64_t> issuing_since_{0};
  std::atomic<std::uint64_t> looks_{0};
  std::atomic<const void*> inside_{nullptr};
  std::atomic<std::size_t> tenants_{0};
  std::atomic<bool> held_{false};
  std::atomic<std::int64_t> connecting_until_{0};
  std::atomic<bool> reset_requested_{false};
  std::atomic<bool> revival_requested_{false};
  std::atomic<bool> move_requested_{false};
  std::atomic<bool> stop_requested_{false};
  std::atomic<bool> abandoned_{false};
  flight_log record_;
  bool worked_ = false; // since the lane was last idle
  clock::time_point spin_end_{};

  std::mutex park_mutex_;
  std::condition_variable park_condition_;
  std::thread thread_;
  std::future<void> over_; // ready before the thread itself has ended
};

} // namespace troupe::detail
