/// The one thread that issues all GPU work of a device, in admission order, and polls its
/// completions.
#pragma once

#include "core/device_state.hpp"
#include "core/fair_limit.hpp"
#include "core/flight_log.hpp"
#include "core/operation.hpp"
#include "core/room.hpp"
#include <troupe/backend.hpp>
#include <troupe/runtime_options.hpp>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

namespace troupe::detail {

class stager;
class staging_ring;

/// Hears from lanes what concerns more than one operation. @thread the lane
class lane_owner {
public:
  virtual ~lane_owner() = default;
  /// A sticky fault: CUDA is gone in this process. Returns what everybody is answered with: the
  /// first fault that any lane saw.
  virtual caf::error on_fault(lane& where, const caf::error& why) noexcept = 0;
  /// The device did not come up, or not again; its state is closed.
  virtual void on_device_failed(lane& where, const caf::error& why) noexcept = 0;
  /// The process that had the device is gone. @thread any
  virtual void on_device_lost(lane& where, const caf::error& why) noexcept = 0;
};

/// How many streams a lane has for communicators at most. What is in one of them runs in the order
/// of admission, which is the same on all devices; so whatever is first of all that is not over has
/// its turn on each of its devices, if as many kernels as there are streams have room there beside
/// each other. NCCL's take at most 32 of the 132 multiprocessors of a Hopper, and fewer of smaller
/// devices. CUDA has 8 queues for streams (CUDA_DEVICE_MAX_CONNECTIONS); what every lane has beside
/// them takes 4.
inline constexpr std::size_t collective_streams = 4;

/// How many streams a lane has for links at most; beyond that, links share them. A device's copies
/// to several others share its copy engine: in several streams it does a bit of each in turn, and
/// all that is between 4 devices then takes a third longer than in one (docs/performance.md). So
/// what takes long, and has nothing to wait for, joins the stream of another link that is at work.
inline constexpr std::size_t peer_streams = 8;

/// @thread the functions for clients: any; what is for operations: the lane itself
class lane : public std::enable_shared_from_this<lane> {
public:
  /// `owner` outlives the lane's thread.
  lane(std::shared_ptr<device_state> state, std::unique_ptr<backend_device> device,
       const lane_options& options, lane_owner& owner);
  ~lane();

  // -- for clients

  /// @errors errc::unavailable: the system gives no thread for it
  caf::error start();
  device_state& state() const noexcept { return *state_; }
  const std::shared_ptr<device_state>& shared_state() const noexcept { return state_; }

  /// Room for one more part? Under admission's lock.
  bool accepts(queue_bound bound) const noexcept {
    return queued() < limit_of(options_.queue_limit, bound);
  }
  std::size_t queue_limit() const noexcept { return options_.queue_limit; }
  /// A part has its place in the order and will be submitted. Under admission's lock.
  void expect_part() noexcept { set(expected_, expected_.load(std::memory_order_relaxed) + 1); }
  /// Ahead of `expect_part` or `submit` for several lanes: their words come at once.
  void fetch_queue() const noexcept { prefetch_to_change(&expected_); }
  void fetch_inbox() const noexcept { prefetch_to_change(&inbox_); }
  /// Takes `p`, which is on this lane, as the next in order; false if it is never issued, and the
  /// lane does not come to it soon: it has ended, or waits for its device to come back. Under
  /// admission's lock; `wake_to_work` follows after it.
  bool submit(part& p) noexcept;
  /// The lanes of all of `parts`, which were submitted.
  static void wake_to_work(std::span<const part> parts) noexcept;
  void wake() noexcept;
  /// The lanes of all of `parts`; they look into each other's words at once, not one by one.
  static void wake(std::span<const part> parts) noexcept;

  /// As `backend_device::is_remote`.
  bool is_remote() const noexcept { return is_remote_; }
  /// As `backend_device::runs_cuda`.
  bool runs_cuda() const noexcept { return runs_cuda_; }

  std::size_t in_flight() const noexcept { return in_flight_.load(std::memory_order_relaxed); }
  /// May something of it run on the device?
  bool at_work() const noexcept { return issuing_.load() || in_flight_.load() != 0; }
  /// A count that goes up when its thread begins, and when it ends, to look after everything once.
  std::uint64_t looks() const noexcept { return looks_.load(std::memory_order_acquire); }
  /// What the count is, at least, when all of that is done again that there is to do now.
  std::uint64_t whole_look() const noexcept {
    const auto now = looks();
    return now + (now % 2 == 0 ? 2 : 3);
  }
  /// How many parts are to be issued.
  std::size_t queued() const noexcept {
    auto left = left_.load(std::memory_order_acquire); // first: it never passes the other
    return expected_.load(std::memory_order_relaxed) - left;
  }
  /// Under admission's lock, for `p`, which is to be submitted: is nothing else there, on the lane
  /// or on the device, and so comes before it?
  bool comes_next(const part& p) const noexcept {
    return queued() == 1 && in_flight_.load() == 0 && !issuing_.load() && state_->acquired() == 0 &&
           nothing_before(p);
  }
  /// Others rely on it to issue a part: until `end_promise` it frees no memory, which may wait for
  /// them. False, and nothing is promised, if it is at that.
  bool promise() noexcept {
    promises_.fetch_add(1);
    if (!freeing_.load())
      return true;
    end_promise();
    return false;
  }
  void end_promise() noexcept { promises_.fetch_sub(1); }

  /// Lets the memory of this generation go and makes a new one, once nothing is in flight; then
  /// publishes it. The state was closed before, and what used it was failed.
  void request_reset() noexcept;
  /// Lets go of what was in a device that is lost, brings it up again, and publishes it. The state
  /// was closed before, and what used the device was failed.
  void request_revival() noexcept;
  /// Frees everything, once nothing is in flight, and ends the thread. The state was closed before.
  void request_stop() noexcept;
  /// Waits for the thread to end; false if it did not in time: it is given up, and keeps what it
  /// has.
  bool join_within(fair_limit& limit) noexcept;
  /// CUDA is gone in this process: everything queued or in flight is let go without another call.
  void abandon() noexcept;

  /// The communicator whose call the lane is in, or about to enter; none otherwise.
  bool is_inside(const void* communicator) const noexcept { return inside_.load() == communicator; }
  /// When the call that issues a part began, the last one or the one it is in; in nanoseconds of
  /// `clock`.
  std::int64_t issuing_since() const noexcept {
    return issuing_since_.load(std::memory_order_relaxed);
  }
  /// Its last operations, without the one that it is issuing.
  const flight_log& record() const noexcept { return record_; }

  /// Marks the lane as inside; `leave` after the call.
  void enter(const void* communicator) noexcept { inside_.store(communicator); }
  void leave() noexcept { inside_.store(nullptr); }

  /// A communicator has a rank here.
  void add_tenant() noexcept { tenants_.fetch_add(1, std::memory_order_relaxed); }
  void remove_tenant() noexcept { tenants_.fetch_sub(1, std::memory_order_relaxed); }

  /// Does something hold the lane (`operation::holds_lane`), so that what is queued is not issued?
  bool held() const noexcept { return held_.load(std::memory_order_relaxed); }
  /// Was it blocked in a call that connects a communicator (`connecting`), now or after `since`?
  bool connected_after(std::int64_t since) const noexcept {
    return connecting_until_.load(std::memory_order_relaxed) > since;
  }

  // -- for operations

  /// Does it wait awake where it does not wait long?
  bool may_spin() const noexcept {
    return options_.spin->count() != 0 && options_.completion == completion_strategy::event_poll;
  }
  backend_device& device() noexcept { return *device_; }
  /// For what must be given back to the device after the lane has ended.
  std::shared_ptr<backend_device> shared_device() const noexcept { return device_; }
  /// Of which there is one.
  stream_view stream(stream_kind kind) const noexcept {
    return streams_[static_cast<std::size_t>(kind)].stream;
  }
  /// Where `p`, which is being issued, goes.
  stream_view stream(const part& p) const noexcept { return streams_[index_of(p)].stream; }
  /// Makes streams, if there can be more, so that each communicator may have its own.
  caf::error provide_streams();
  /// Makes the stream for the link to `peer`, if it is not there.
  caf::error provide_peer_stream(int peer);
  /// Will `p`, once issued, start without fail: is nothing before it in its stream, and no kernel
  /// on the device, but what is certain to end?
  bool starts_for_sure(const part& p) const noexcept;
  /// Is all work of communicators over, but what has failed?
  bool collectives_over() const noexcept;
  /// Is what must come before `p` over, or in the stream that it shares with it?
  static bool nothing_before(const part& p) noexcept;
  /// Before and after a call that connects a communicator.
  void begin_connecting() noexcept;
  void end_connecting() noexcept;
  const device_properties& properties() const noexcept { return properties_; }
  staging_ring& upload_ring() noexcept { return *upload_ring_; }
  staging_ring& download_ring() noexcept { return *download_ring_; }
  stager& copier() noexcept { return *stager_; }
  /// Up to here a copy over NVLink takes less time than the calls that make it.
  static constexpr std::size_t small_copy_bytes = std::size_t{256} << 10;
  /// Issues `what`, of `p`; at once, or together with the small copies that follow it.
  caf::error copy_over_link(part& p, const peer_copy& what);
  /// A recorded event that marks this point of `kind`'s stream; `retire` gives it back.
  caf::expected<event_view> mark(stream_kind kind) { return mark(stream(kind)); }
  caf::expected<event_view> mark(stream_view stream);
  void retire(event_view event) noexcept;
  /// What is in the stream of `p` so far is recorded in its event: others may wait for that.
  static void set_recorded(part& p) noexcept;
  /// It is never issued. What it would have kept in order on memory of other devices, whose streams
  /// go on, keeps that order (`part::state::dropped`).
  static void set_skipped(part& p) noexcept;
  /// What was before `p` is over, if it was dropped: its operation is settled.
  static void end_drop(part& p) noexcept;
  /// Makes `stream` wait for what must come before `p`.
  caf::error wait_for_predecessors(part& p, stream_view stream);
  /// Is `x` neither recorded nor over? If so, and `x` is another lane's, that one wakes this one.
  bool must_await(const part& x) noexcept;
  /// Makes `stream` wait for `x`, which is recorded or over.
  caf::error wait_for(const part& x, stream_view stream);

private:
  struct lane_stream {
    stream_view stream;
    std::deque<part*> in_flight;
    part* continuing = nullptr; // issues piece by piece, and the stream is its own meanwhile
    clock::time_point not_done_since{}; // the one that is asked for its predecessors, too
    // Of a link's, since nothing was in flight:
    std::uint64_t largest_bytes = 0;
    bool waits = false; // something came that had to wait for others
  };
  /// Small copies that come behind one another in the stream of a link: together in one call, as
  /// far as they do not build on each other, and with one event behind all.
  struct copy_run {
    lane_stream* in = nullptr; ///< null: there is none
    std::size_t parts = 0;     ///< the last ones that are in flight there
    std::vector<peer_copy> copies;
    std::vector<part*> owners; ///< one for each copy
    bool goes_apart = false;   ///< each in a call of its own
  };
  enum class verdict : std::uint8_t { held, gone };
  static constexpr auto stand_in = static_cast<std::size_t>(stream_kind::compute);
  static constexpr auto lend_stream = static_cast<std::size_t>(stream_kind::lend);
  static constexpr auto first_collective = static_cast<std::size_t>(stream_kind::collective);
  static constexpr auto first_peer = first_collective + collective_streams;
  static_assert(lend_stream + 1 == first_collective && first_collective + 2 == stream_count);

  /// In the order in which they were made.
  std::span<lane_stream* const> made_streams() const noexcept { return made_; }
  std::span<const lane_stream> collective_range() const noexcept {
    return {streams_.data() + first_collective, collective_streams};
  }
  std::span<const lane_stream> peer_range() const noexcept {
    return {streams_.data() + first_peer, peer_streams};
  }
  /// The communicator, the link or the lends whose work it is; null: what has its stream for good.
  const stream_tenant* tenant_of(const part& p) const noexcept {
    return p.stream == stream_kind::peer   ? &links_[link_of(p.peer)]
           : p.stream == stream_kind::lend ? &lends_
                                           : p.tenant;
  }
  stream_tenant* tenant_of(const part& p) noexcept {
    return const_cast<stream_tenant*>(std::as_const(*this).tenant_of(p));
  }
  std::size_t index_of(const part& p) const noexcept {
    const auto* who = tenant_of(p);
    return who != nullptr ? who->stream : static_cast<std::size_t>(p.stream);
  }
  static std::size_t link_of(int peer) noexcept {
    return static_cast<std::size_t>(peer) % peer_streams;
  }
  lane_stream& stream_of(const part& p) noexcept { return streams_[index_of(p)]; }
  const lane_stream& stream_of(const part& p) const noexcept { return streams_[index_of(p)]; }
  std::size_t choose_stream(const stream_tenant& who) const noexcept;
  std::size_t choose_peer_stream(const part& p) const noexcept;
  caf::error wait_for_what_is_before(part& p);

  void run() noexcept;
  bool come_up();
  caf::error open_device();
  caf::error make_stream(std::size_t index);
  caf::error make_collective_streams(std::size_t number);
  /// A stream that most lanes do not need.
  caf::error provide_late(std::size_t index);
  /// The stream where `p` goes, if it is one of these.
  caf::error provide_stream_of(const part& p);
  void go_down() noexcept;
  void reset_now();
  void revive();
  void set_away(bool x) noexcept;
  void publish();
  void lose_streams(const caf::error& why) noexcept;
  void forget_streams() noexcept;
  void forget_late() noexcept;
  bool serve_control();
  bool take_inbox() noexcept;
  bool issue_ready();
  bool drop_failed() noexcept;
  bool is_held() noexcept;
  bool lets_pass() noexcept;
  verdict try_issue(part& p);
  void fetch_ahead() const noexcept;
  std::optional<std::uint64_t> held_by(part& p) noexcept;
  static void see_through_dropped(part& p);
  static void wake_waiting(const part& x) noexcept;
  bool stands_between(const part& p) const noexcept;
  caf::error check_generation(const part& p) const;
  void after_issue(part& p, const caf::expected<issue_outcome>& outcome);
  void put_in_flight(part& p);
  bool run_goes_on_after(const part& p) const noexcept;
  bool joins_run(const part& p) const noexcept;
  void end_run();
  void issue_run(stream_view stream);
  void issue_apart();
  void mark_last(lane_stream& s, std::size_t parts);
  bool proceed_continuing();
  bool poll();
  bool poll(lane_stream& s);
  static void set(std::atomic<std::size_t>& count, std::size_t x) noexcept {
    count.store(x, std::memory_order_release); // it has one writer at a time
  }
  /// One part less is to be issued.
  void note_left() noexcept { set(left_, left_.load(std::memory_order_relaxed) + 1); }
  void note_started(lane_stream& s) noexcept;
  static void note_copy(lane_stream& s, const part& p) noexcept;
  void leave_flight(part& p) noexcept;
  void finish(part& p, std::int64_t now) noexcept;
  void skip(part& p) noexcept;
  void lose(part& p, const caf::error& why) noexcept;
  bool is_lost() const noexcept;
  bool owner_tells(const caf::error& error) const noexcept;
  verdict wait_for_owner(part& p);
  caf::error note(const caf::error& error) noexcept;
  caf::error note_fault(const caf::error& error) noexcept;
  caf::error in_full(const part& p, const caf::error& error) const;
  bool settle_late() noexcept;
  void settle_now() noexcept;
  bool drain_released();
  bool nothing_in_flight() const noexcept;
  bool nothing_continues() const noexcept;
  void abandon_now() noexcept;
  void idle();
  void notify() noexcept;
  bool has_input() const noexcept;
  bool ends_now() noexcept;

  const std::shared_ptr<device_state> state_;
  std::vector<std::shared_ptr<void>> given_up_; // what the device's streams may still use
  std::shared_ptr<backend_device> device_; // until the lane ends: then somebody else may open it
  const bool runs_cuda_;
  const bool is_remote_;
  const lane_options options_;
  lane_owner& owner_;
  device_properties properties_;
  std::array<lane_stream, first_peer + peer_streams> streams_;
  std::array<stream_tenant, peer_streams> links_; // all that one has in flight is in one stream
  stream_tenant lends_;
  std::vector<lane_stream*> made_;   // of them; the rest can follow
  std::size_t continuing_ = 0;       // how many of them have a part that continues
  std::size_t collectives_made_ = 0; // the first ones
  std::vector<event_view> events_;   // not in use
  std::unique_ptr<staging_ring> upload_ring_;
  std::unique_ptr<staging_ring> download_ring_;
  std::unique_ptr<stager> stager_;
  std::deque<part*> waiting_;
  copy_run run_;                                 // while parts are issued, one after the other
  std::vector<std::shared_ptr<operation>> late_; // answered, and still to be settled
  clock::time_point settle_at_{};

  // Words that clients change, away from the lane's own: the first line is what an idle lane looks
  // at.
  alignas(64) std::atomic<part*> inbox_{nullptr};
  std::atomic<const operation*> newest_{nullptr};  // whose part came last; it may be gone
  std::atomic<const void*> newest_needs_{nullptr}; // what that part needs; the same
  std::atomic<bool> signalled_{false};
  std::atomic<bool> parked_{false};
  bool closed_ = false; // nobody looks into it any more; under the lock of the order
  bool away_ = false;   // its lane is busy to get a lost device back; the same
  alignas(64) std::atomic<std::size_t> expected_{0}; // parts; under admission's lock

  alignas(64) std::atomic<std::size_t> in_flight_{0};
  std::atomic<std::size_t> left_{0}; // how many of the parts are issued, or never will be
  std::atomic<bool> issuing_{false}; // or continuing
  std::atomic<std::int64_t> issuing_since_{0};
  std::atomic<std::uint64_t> looks_{0};
  std::atomic<const void*> inside_{nullptr};
  std::atomic<std::size_t> tenants_{0};
  std::atomic<bool> held_{false};
  std::atomic<std::int64_t> connecting_until_{0};
  std::atomic<int> promises_{0};
  std::atomic<bool> freeing_{false};
  std::atomic<bool> reset_requested_{false};
  std::atomic<bool> revival_requested_{false};
  std::atomic<bool> stop_requested_{false};
  std::atomic<bool> abandoned_{false};
  flight_log record_;
  bool worked_ = false; // since the lane was idle last
  clock::time_point spin_end_{};

  std::mutex park_mutex_;
  std::condition_variable park_condition_;
  std::thread thread_;
  std::future<void> over_; // of the thread: all but the end of itself
};

} // namespace troupe::detail
