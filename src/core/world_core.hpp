/// The data side of a world: what its requests need to know at once. The `nccl_world` actor decides
/// over its life; this carries out.
#pragma once

#include "core/communicator.hpp"
#include "core/communicator_role.hpp"
#include "core/rank_call.hpp"
#include "core/rank_matching.hpp"
#include "core/rank_set.hpp"
#include "core/room.hpp"
#include "core/runtime.hpp"
#include "core/symmetric_memory.hpp"
#include <troupe/collective.hpp>
#include <troupe/nccl_world.hpp>
#include <troupe/world_status.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace troupe::detail {

class rank_request;

class world_core : public std::enable_shared_from_this<world_core> {
public:
  world_core(std::shared_ptr<runtime> runtime, std::string name,
             std::vector<std::shared_ptr<lane>> lanes, const world_limits& limits);
  ~world_core();

  const std::shared_ptr<runtime>& owner() const noexcept { return runtime_; }
  const std::string& name() const noexcept { return name_; }
  const world_tag& tag() const noexcept { return tag_; }
  const world_limits& limits() const noexcept { return limits_; }
  std::size_t size() const noexcept { return lanes_.size(); }
  /// By rank; none where the rank is in another process.
  const std::vector<std::shared_ptr<lane>>& lanes() const noexcept { return lanes_; }
  /// The ranks that are in this process: all, or one.
  const std::vector<std::size_t>& local_ranks() const noexcept { return local_ranks_; }
  /// `size` if none that is in this process is on the device.
  std::size_t rank_of(int device) const noexcept;

  world_status status() const;
  /// Which ranks it goes on without (`loss_policy::shrink`).
  rank_set absent() const noexcept { return rank_set{absent_.load(std::memory_order_acquire)}; }
  /// Under the lock of the order.
  std::uint64_t membership() const noexcept { return membership_; }
  /// How often `absent` has changed; the same.
  std::uint64_t absences() const noexcept { return absences_; }
  /// May a request that needs no communicator, and means `membership`, go on?
  /// @errors errc::unavailable: the world has ended; errc::membership_changed
  caf::error check_view(const char* verb, std::uint64_t membership) const;

  // -- for the actor

  using end_listener = std::function<void(std::uint64_t, const caf::error&, communicator_role)>;

  /// Its ranks are driven by others: `on_live` hears, on any thread, of each communicator that
  /// requests would run on, and of what the world is then. Before the first `build`.
  void set_on_live(std::function<void(communicator&, const world_status&)> on_live);
  /// `on_end` hears, on any thread, that the communicator of an epoch ended, and what it was.
  /// `on_gone` hears when one that ended is off its devices. Before the first `build`.
  void set_on_end(end_listener on_end, std::function<void()> on_gone = {});
  /// Builds a communicator in the background and connects it on the lanes; `done` hears of it on
  /// any thread, once. Returns the epoch that it is for.
  std::uint64_t build(std::function<void(std::uint64_t, const caf::error&)> done);
  /// It is connected: requests that wait go on, or, if there is a live one, it is the standby.
  /// False if it has ended.
  bool open();
  /// Makes ready in the background what the next loss of a device takes: its spare, or a standby
  /// for each rank that may be lost (`standby_policy::survivors`, `full`), or both; `done` hears of
  /// it on any thread, once. While the world is ready and has none.
  void prepare_for_loss(std::function<void(const caf::error&)> done);
  /// Does `prepare_for_loss` something that is not done?
  bool wants_preparation() const;
  /// The devices are all there again, one of them as its spare was: goes on with the standby that
  /// was built for that. False: there is none, and one is to be built; no standby is left.
  bool switch_to_spare();
  /// Is a device that the world goes on without there again, so that a communicator can have it?
  bool may_grow() const;
  /// What is being built is not wanted any more.
  void give_up_build(const caf::error& cause);
  /// Requests are refused, those that wait or run are answered with `why`.
  void close(world_phase phase, const caf::error& why);
  /// For the process of one rank: goes on with a communicator that was built for all of them, as
  /// `view` says. False: it has gone on with a later one.
  bool enter(const world_status& view, communicator_ranks ranks);
  /// The communicator of an epoch ends because of `cause`, everywhere.
  void leave(std::uint64_t epoch, const caf::error& cause);
  /// All communicators with this device, if any, end because of `cause`; requests wait for the
  /// next.
  /// @return what is being built has the device: `build` has to be called again
  bool end_epoch(int device, const caf::error& cause);
  /// A device that the world waits for will not be there again: goes on without it, if that is the
  /// policy.
  /// @return it does so
  bool go_on_without_failed(int device);
  /// Communicators that are on the devices, also those that have ended.
  int communicators() const noexcept { return communicators_.load(); }

  // -- for requests

  using answer = std::shared_ptr<operation_of<collective_done>>;

  answer run(const collective_view& what, const request_options& options);
  answer run(const group& what);
  /// The call of one rank, as `rank_call_of` says; the others' make the operation with it.
  /// `self`, this world, is kept by the request (`counted_apart`).
  answer run(int rank, const collective_view& what, const request_options& options,
             std::shared_ptr<world_core> self);
  /// Messages of one rank, likewise.
  answer run(const exchange& what, std::shared_ptr<world_core> self);

  /// Why this process has no device of `rank`, which is out of range or in another process.
  caf::error why_no_device_of(std::size_t rank) const;
  /// `count` elements on every rank, in rank order; `symmetric`: registered with the communicators
  /// that are there, unless that fails, when it is answered, and with later ones.
  std::shared_ptr<operation_of<world_buffers>>
  allocate(dtype type, std::size_t count, allocation_options what, const request_options& options);

  // -- for requests, under the lock of the order

  /// May a request that means `membership`, and was made for a world without `absent`, go on?
  /// @errors errc::unavailable: the world has ended; for a request that was admitted before, why it
  ///         did. errc::membership_changed
  caf::error check_view(const operation& op, std::uint64_t membership, rank_set absent) const;
  /// May one that waits for ranks' calls since `absences` was that?
  /// @errors errc::membership_changed
  caf::error check_ranks_since(const operation& op, std::uint64_t absences) const;
  /// Counts one more that waits; `leave_queue`, on any thread, when it does so no more.
  /// @errors errc::overloaded: there is no room
  caf::error enter_queue(const operation& op, queue_bound bound);
  rank_matching& matching() noexcept { return matching_; }
  /// May a refused call of that rank count? Not when no others come, nor when they do not wait for
  /// it. Under the lock of the order.
  bool counts_calls_of(const rank_end& x) const noexcept;
  /// Are all ranks in this process?
  bool is_whole() const noexcept { return local_ranks_.size() == lanes_.size(); }
  void leave_queue() noexcept {
    waiting_.fetch_sub(1);
    process_room.notify();
  }
  /// No communicator now, but there will be one, or none any more.
  bool waits() const noexcept { return phase_ <= world_phase::ready && !has_communicator(); }
  /// The communicator that there is has not all its connections yet.
  bool waits_for_connections() const noexcept {
    return has_communicator() && !current_->fully_connected();
  }
  bool runs_on(const communicator* x) const noexcept { return current_.get() == x; }
  /// The communicator of a request that need not wait; it is said in `view`.
  std::shared_ptr<communicator> join(collective_done& view) const;

private:
  answer do_nothing(const char* verb, const request_options& options, rank_set without);
  answer start_alone(const char* verb, rank_call call, const request_options& options,
                     std::shared_ptr<world_core> self);
  std::shared_ptr<rank_request> new_request(const char* verb, rank_call call, rank_set without,
                                            const request_options& options,
                                            std::shared_ptr<world_core> self);
  void make_spares_of(std::size_t rank);
  answer start(const char* verb, std::vector<rank_call> calls, const request_options& options,
               rank_set without);
  answer start(std::shared_ptr<collective_operation> op, const request_options& options);
  caf::error check_whole(const char* verb) const;
  caf::error check_rank(const char* verb, int rank) const;
  caf::error check_deadline(const char* verb, int rank, const request_options& options) const;
  void lose_call(const collective_operation& refused);
  void count_refused(const rank_end& of, const caf::error& why, std::uint64_t membership);
  caf::expected<rank_set> to_leave_out(const char* verb, const request_options& options) const;
  std::shared_ptr<communicator> own(std::uint64_t epoch, rank_set absent, communicator_ranks ranks);
  std::shared_ptr<communicator> adopt(std::uint64_t epoch, rank_set absent,
                                      const std::vector<world_member>& members,
                                      communicator_ranks ranks);
  void set_absent(rank_set absent);
  void begin_anew() noexcept;
  failure refusal_of(const operation& op, errc code, std::string detail) const;
  std::vector<local_rank> ranks_without(rank_set absent) const;
  /// A communicator of these ranks alone.
  caf::expected<communicator_ranks> build_of(std::span<const local_rank> ranks) const;
  caf::error prepare_for_loss(std::uint64_t first_epoch, std::uint64_t membership,
                              std::uint64_t losses);
  caf::error build_standby(std::uint64_t epoch, std::uint64_t membership, std::size_t k);
  void on_device_loss(int device, const caf::error& why);
  void announce();
  void go_on_without(int device);
  bool switch_to_survivors();
  void on_spare_lost(const std::shared_ptr<communicator>& which, std::size_t k);
  void discard_prepared();
  bool is_current(communicator& x) const;
  bool is_ready(rank_set absent) const;
  bool has_standby() const noexcept;
  bool has_standby_for_each() const noexcept;
  /// Calls `done` when all lanes have made the connections, or with why not.
  void connect(const std::shared_ptr<communicator>& target, connect_scope what,
               std::function<void(const caf::error&)> done);
  void connect_the_rest(const std::shared_ptr<communicator>& target);
  std::vector<std::shared_ptr<communicator>> communicators_there() const;
  void register_windows(const std::shared_ptr<communicator>& target, std::function<void()> then);
  void deregister(const std::shared_ptr<communicator>& target,
                  const std::shared_ptr<symmetric_memory>& x);
  void on_registered(const std::shared_ptr<communicator>& target,
                     const std::vector<std::shared_ptr<symmetric_memory>>& memory,
                     const caf::error& why);
  void forget(const std::shared_ptr<symmetric_memory>& x);
  void on_communicator_end(communicator& which, const caf::error& cause) noexcept;
  std::vector<world_member> members_without(rank_set absent) const;
  bool leave_current(const caf::error& cause, std::vector<std::shared_ptr<communicator>>& unused);
  std::vector<std::shared_ptr<communicator>> take_leaving();
  bool switch_to_standby(const caf::error& cause);
  std::chrono::nanoseconds patience() const;
  clock::time_point behind_the_build() const;
  world_status status_locked() const;
  bool has_communicator() const noexcept { return current_ && current_->live(); }

  const std::shared_ptr<runtime> runtime_;
  const std::string name_;
  const world_tag tag_ = make_world_tag(name_);
  const std::vector<std::shared_ptr<lane>> lanes_;
  const std::vector<std::size_t> local_ranks_;
  const world_limits limits_;
  const loss_policy on_loss_;
  end_listener on_end_;
  std::function<void()> on_gone_;
  std::function<void(communicator&, const world_status&)> on_live_; // none: requests come here
  std::atomic<std::size_t> waiting_{0};
  std::atomic<int> communicators_{0};
  // under the lock of the order
  world_phase phase_ = world_phase::building;
  caf::error reason_;
  std::uint64_t epoch_ = 0;       // of the live communicator, or of the one to be
  std::uint64_t last_epoch_ = 0;  // that was given to a communicator
  std::uint64_t given_up_ = 0;    // a communicator of this epoch is not wanted any more
  std::uint64_t announced_ = 0;   // to `on_live_`
  std::uint64_t first_epoch_ = 0; // that this process's ranks entered, where others have ranks, too
  std::uint64_t losses_ = 0;      // of devices
  rank_set build_absent_;         // of the latest `build`
  std::uint64_t membership_ = 0;
  std::atomic<std::uint64_t> absent_{0}; // changes under the lock
  std::uint64_t absences_ = 0;
  std::vector<world_member> members_;
  std::shared_ptr<communicator> next_;                  // being connected
  std::shared_ptr<communicator> current_;               // for requests
  std::shared_ptr<communicator> standby_;               // connected, and idle
  std::vector<std::shared_ptr<communicator>> prepared_; // the same, by the rank that may be lost
  std::vector<std::weak_ptr<communicator>> leaving_;    // something may be pending on them
  bool opened_ = false;                                 // once
  bool spares_ready_ = false;
  rank_matching matching_;
  spare<collective_operation> spare_operation_;            // for the next request of all ranks
  std::vector<std::weak_ptr<symmetric_memory>> symmetric_; // in the order of allocation
};

/// What `world_limits::on_loss` comes to.
loss_policy loss_policy_of(const world_limits& x) noexcept;

/// The same world with a reference count of its own: all ranks' threads at once would wait for
/// each other to change one.
inline std::shared_ptr<world_core> counted_apart(const std::shared_ptr<world_core>& x) {
  return {std::make_shared<std::shared_ptr<world_core>>(x), x.get()};
}

} // namespace troupe::detail
