/// The data side of a world: the state that requests need at once. The `nccl_world` actor decides
/// about the world's life, and this class carries that out.
#pragma once

#include "collective/collective_world.hpp"
#include "collective/communicator.hpp"
#include "collective/communicator_role.hpp"
#include "collective/rank_call.hpp"
#include "collective/rank_matching.hpp"
#include "foundation/rank_set.hpp"
#include "operation/room.hpp"
#include "runtime/runtime.hpp"
#include <troupe/collective.hpp>
#include <troupe/nccl_world.hpp>
#include <troupe/world_status.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace troupe::detail {

class rank_request;

class world_core final : public collective_world,
                         public handover_listener,
                         public std::enable_shared_from_this<world_core> {
public:
  world_core(std::shared_ptr<runtime> runtime, std::string name,
             std::vector<std::shared_ptr<lane>> lanes, const world_limits& limits,
             collectives_policy wanted = collectives_policy::nccl,
             collectives_policy collectives = collectives_policy::nccl,
             const std::optional<way_table>& ways = {});
  ~world_core();

  const std::string& name() const noexcept { return name_; }
  /// Returns the policy that was asked for. It need not be possible for these devices.
  collectives_policy wanted_collectives() const noexcept { return wanted_collectives_; }
  /// Returns the way of the communicators that decide about the world's phase.
  collective_way main_way() const noexcept {
    return collectives_ == collectives_policy::nccl ? collective_way::nccl : collective_way::direct;
  }
  /// Returns the table that was asked for.
  const std::optional<way_table>& wanted_ways() const noexcept { return wanted_ways_; }
  /// Returns the rank on the device; `size` if no rank of this process is on it.
  std::size_t rank_of(int device) const noexcept;

  world_status status() const { return status(admission_lock{}); }
  /// Returns the ranks that the world goes on without (`loss_policy::shrink`).
  rank_set absent() const noexcept { return rank_set{absent_.load(std::memory_order_acquire)}; }
  /// Checks whether a request that needs no communicator, and names `membership`, may go on.
  /// @errors errc::unavailable: the world has ended; errc::membership_changed
  caf::error check_view(const char* verb, std::uint64_t membership) const;

  // -- for the actor

  using end_listener = std::function<void(std::uint64_t, const caf::error&, communicator_role)>;

  /// For a world whose ranks are driven by others. `on_live` is called, on any thread, with each
  /// communicator that requests would run on and the world's status. Before the first `build`.
  void set_on_live(std::function<void(communicator&, const world_status&)> on_live);
  /// `on_end` is called, on any thread, when the communicator of an epoch has ended, with its role.
  /// `on_gone` is called when an ended communicator has left its devices. Before the first `build`.
  /// `on_wanted` is called, under the admission lock, when `build_beside` is needed.
  void set_on_end(end_listener on_end, std::function<void()> on_gone = {},
                  std::function<void()> on_wanted = {});
  /// Builds a communicator in the background and connects it on the lanes. `done` is called once,
  /// on any thread. Returns the epoch of the communicator.
  std::uint64_t build(std::function<void(std::uint64_t, const caf::error&)> done);
  /// Opens the communicator that is connected: waiting requests go on or, if there is a live
  /// communicator, it becomes the standby. Returns false if it has ended.
  bool open();
  /// Prepares in the background for the next loss of a device: makes spares, or a standby for each
  /// rank that may be lost, or both, as the policies say. `done` is called once, on any thread. To
  /// be called while the world is ready and has none.
  void prepare_for_loss(std::function<void(const caf::error&)> done);
  /// Returns whether `prepare_for_loss` has something left to do.
  bool wants_preparation() const;
  /// Returns whether there is to be a standby over the same members.
  bool keeps_standby() const noexcept;
  /// All devices are ready again, one of them as its former spare: goes on with the standby built
  /// for that. Returns false if there is none: a communicator must be built; no standby is left.
  /// Does nothing while a device is handed over.
  bool switch_to_spare();
  /// Returns whether an absent device is ready again, so that a communicator can include it.
  bool may_grow() const;
  /// Builds the communicator of NCCL beside the direct one in the background, for which requests
  /// wait. `done` is called once, on any thread.
  void build_beside(std::function<void(const caf::error&)> done);
  /// Wants it even before a request does, unless everything goes direct.
  void want_beside_ahead();
  /// Returns whether `build_beside` has something to do.
  bool wants_beside() const;
  /// Gives up the communicator that is being built.
  void give_up_build(const caf::error& cause);
  /// Refuses new requests and answers waiting and running ones with `why`.
  void close(world_phase phase, const caf::error& why);
  /// For the process of one rank: adopts a communicator that was built for all ranks, as `view`
  /// says. Returns false if the world has gone on with a later one, or has ended.
  bool adopt_communicator(const world_status& view, communicator_ranks ranks);
  /// Ends the communicator of an epoch because of `cause`, for all ranks.
  void fail_epoch(std::uint64_t epoch, const caf::error& cause);
  /// Ends all communicators with the device of a report, if any, because of its reason. Requests
  /// wait for the next one. If the device is in another incarnation by now, none of the reported
  /// one is left, and only what is being built is given up.
  /// @return whether the communicator being built has the device: `build` has to be called again
  bool end_epoch(const device_changed& report);
  /// Goes on without a device that will not come back, if that is the policy.
  /// @return whether it does
  bool go_on_without_failed(int device);
  /// Returns whether requests wait until a communicator is built. Not while a device is handed
  /// over: one that is built then would have a rank in its former process.
  bool needs_communicator() const;
  caf::error check_handover(locked lock, int device) const override;
  void begin_handover(locked lock, int device, const caf::error& why) override;
  void leave_process(int device, const caf::error& why) override;
  bool has_left(int device) const override;
  void end_handover(int device, const caf::error& why) override;
  /// Returns the number of communicators on the devices, with those that have ended.
  int communicators() const noexcept { return communicators_.load(); }

  // -- for requests

  using answer = std::shared_ptr<operation_of<collective_done>>;

  answer run(const collective_view& what, const request_options& options);
  answer run(const group& what);
  /// Runs the call of one rank (`rank_call_of`). The other ranks' calls form the operation with it.
  /// The request keeps `self`, this world (`counted_apart`).
  answer run(int rank, const collective_view& what, const request_options& options,
             std::shared_ptr<world_core> self);
  /// The same for messages of one rank.
  answer run(const exchange& what, std::shared_ptr<world_core> self);

  /// Checks whether this process makes the requests of all ranks.
  /// @errors errc::not_supported
  caf::error check_whole(const char* verb) const;
  /// Returns the ranks that a request with `options` leaves out.
  /// @errors errc::membership_changed: it may not leave out any; found before its handles are
  ///         checked
  caf::expected<rank_set> to_leave_out(const char* verb, const request_options& options) const;
  using prepared = caf::expected<std::shared_ptr<collective_operation>>;
  /// Returns an operation for `what`, which the caller starts or drops. It leaves out the ranks of
  /// `without` (`to_leave_out`). This process makes the requests of all ranks (`check_whole`).
  /// @errors why the request is refused. When it is admitted, errc::membership_changed: other ranks
  ///         than `without` are absent by then
  prepared prepare(const collective_view& what, const request_options& options, rank_set without);
  /// The same for a group; null if it has no calls.
  prepared prepare(const group& what, rank_set without);

  /// Returns why this process has no device of `rank`, which is out of range or in another process.
  caf::error why_no_device_of(std::size_t rank) const;
  /// Allocates `count` elements on every rank, in rank order.
  std::shared_ptr<operation_of<world_buffers>>
  allocate(dtype type, std::size_t count, allocation_options what, const request_options& options);

  // -- for collectives

  caf::error check_view(locked lock, const operation& op, std::uint64_t membership,
                        rank_set absent) const override;
  caf::error check_ranks_since(locked lock, const operation& op,
                               std::uint64_t absence_changes) const override;
  caf::error enter_queue(locked lock, const operation& op, queue_bound bound) override;
  bool counts_calls_of(locked, const rank_end& x) const noexcept override;
  collective_way way_of(const rank_call& x) const noexcept override;
  bool waits(locked lock, collective_way way) noexcept override;
  bool waits_for_connections(locked, collective_way way) const noexcept override {
    return !is_beside(way) && has_communicator() && !current_->fully_connected();
  }
  bool runs_on(locked, collective_way way, const communicator* x) const noexcept override {
    return (is_beside(way) ? beside_.live : current_).get() == x;
  }
  std::shared_ptr<communicator> join(locked, collective_way way,
                                     collective_done& view) const override;
  std::shared_ptr<collective_world> self() override { return shared_from_this(); }

private:
  /// Checks a request of all ranks, and returns the ranks that it leaves out.
  /// @errors those of `check_whole` and `to_leave_out`
  caf::expected<rank_set> check_and_leave_out(const char* verb,
                                              const request_options& options) const;
  /// As the public function, without the ranks that are absent now.
  prepared prepare(const collective_view& what, const request_options& options);
  prepared prepare(const group& what);
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
  template <class Prepare>
  answer start_retried(std::shared_ptr<collective_operation> first, const request_options& options,
                       Prepare prepare);
  std::shared_ptr<collective_operation> operation_of_calls(const char* verb,
                                                           std::vector<rank_call> calls,
                                                           std::uint64_t membership,
                                                           rank_set without);
  std::shared_ptr<collective_operation> new_operation();
  caf::error check_rank(const char* verb, int rank) const;
  caf::error check_deadline(const char* verb, int rank, const request_options& options) const;
  void lose_call(const collective_operation& refused);
  void count_refused(const rank_end& of, const caf::error& why, std::uint64_t membership);
  std::shared_ptr<communicator> own(std::uint64_t epoch, collective_way way, rank_set absent,
                                    communicator_ranks ranks);
  std::shared_ptr<communicator> adopt(std::uint64_t epoch, rank_set absent,
                                      const std::vector<world_member>& members,
                                      communicator_ranks ranks);
  void set_absent(locked lock, rank_set absent);
  void begin_anew(locked) noexcept;
  failure refusal_of(locked, const operation& op, errc code, std::string detail) const;
  std::vector<local_rank> ranks_without(rank_set absent) const;
  /// Builds a communicator of these ranks alone, of the main way.
  caf::expected<communicator_ranks> build_of(std::span<const local_rank> ranks) const;
  bool is_beside(collective_way way) const noexcept { return way != main_way(); }
  void want_beside(locked);
  std::shared_ptr<communicator> adopt_beside(std::uint64_t epoch,
                                             const std::vector<world_member>& members,
                                             communicator_ranks ranks);
  bool open_beside(const std::shared_ptr<communicator>& x);
  void drop_beside(const std::shared_ptr<communicator>& x);
  caf::error prepare_for_loss(std::uint64_t first_epoch, std::uint64_t membership,
                              std::uint64_t losses);
  caf::error build_standby(std::uint64_t epoch, std::uint64_t membership, std::size_t k);
  void on_device_loss(int device, const caf::error& why);
  void on_device_back();
  void announce();
  void go_on_without(locked lock, int device);
  bool switch_to_survivors(locked);
  void on_spare_lost(const std::shared_ptr<communicator>& which, std::size_t k);
  void discard_prepared();
  bool switch_to_spare(locked lock, std::vector<std::shared_ptr<communicator>>& unused);
  void go_on_after_switch();
  void take_prepared(locked, std::vector<std::shared_ptr<communicator>>& to);
  bool is_current(communicator& x) const;
  bool is_ready(rank_set absent) const;
  /// Returns whether communicators are kept ready.
  bool keeps_communicators() const noexcept;
  /// Returns whether there is to be a standby for each rank that may be lost.
  bool prepares_standbys() const noexcept;
  bool has_standby(locked) const noexcept;
  bool has_standby_for_each(locked) const noexcept;
  caf::error end_on_fault(const caf::error& why) const;
  /// Starts `op`, by which `target` is connected, in part or `completes`. Then calls `done`.
  void start_on(const std::shared_ptr<communicator>& target,
                std::shared_ptr<operation_of<nothing>> op, bool completes,
                std::function<void(const caf::error&)> done);
  /// Calls `done` when all lanes have made the connections, or with the error.
  void connect(const std::shared_ptr<communicator>& target, connect_scope what,
               std::function<void(const caf::error&)> done);
  /// Calls `done` when all devices have access to each other's memory, or with the error.
  void give_access(const std::shared_ptr<communicator>& target,
                   std::function<void(const caf::error&)> done);
  void connect_the_rest(const std::shared_ptr<communicator>& target);
  void on_communicator_end(communicator& which, const caf::error& cause) noexcept;
  std::vector<world_member> members_without(locked, rank_set absent) const;
  bool leave_current(locked lock, const caf::error& cause,
                     std::vector<std::shared_ptr<communicator>>& unused);
  std::vector<std::shared_ptr<communicator>> take_leaving(locked);
  bool switch_to_standby(locked, const caf::error& cause);
  std::chrono::nanoseconds patience() const;
  clock::time_point behind_the_build() const;
  world_status status(locked lock) const;
  bool has_communicator() const noexcept { return current_ && current_->live(); }

  const std::string name_;
  const loss_policy on_loss_;
  const collectives_policy wanted_collectives_;
  const collectives_policy collectives_;
  const std::optional<way_table> wanted_ways_;
  const way_table ways_;
  end_listener on_end_;
  std::function<void()> on_gone_;
  std::function<void()> on_wanted_;
  std::function<void(communicator&, const world_status&)> on_live_; // none: requests are made here
  std::atomic<int> communicators_{0};
  std::atomic<int> builds_{0}; // that are not over, except of communicators beside
  // under the admission lock
  world_phase phase_ = world_phase::building;
  caf::error reason_;
  std::uint64_t epoch_ = 0;       // of the live communicator, or of the next one
  std::uint64_t last_epoch_ = 0;  // the last one that was given to a communicator
  std::uint64_t build_epoch_ = 0; // of the latest `build`
  std::uint64_t given_up_ = 0;    // the communicator of this epoch is not wanted any more
  std::uint64_t announced_ = 0;   // the last one passed to `on_live_`
  std::uint64_t first_epoch_ = 0; // the first one adopted, if other processes have ranks, too
  std::uint64_t losses_ = 0;      // number of devices that were lost or handed over
  rank_set build_absent_;         // absent ranks of the latest `build`
  std::atomic<std::uint64_t> absent_{0}; // changes under the lock
  std::vector<world_member> members_;
  std::shared_ptr<communicator> next_;    // being connected
  std::shared_ptr<communicator> current_; // for requests
  struct {
    std::shared_ptr<communicator> next; // being connected
    std::shared_ptr<communicator> live;
    bool wanted = false;
  } beside_; // NCCL's, beside a direct one (`collectives_policy::automatic`)
  std::shared_ptr<communicator> standby_;               // connected, and idle
  std::vector<std::shared_ptr<communicator>> prepared_; // the same, by the rank that may be lost
  std::vector<std::weak_ptr<communicator>> leaving_; // replaced; something may be pending on them
  std::optional<int> handed_over_;                   // the device that is
  std::shared_ptr<communicator> left_;               // for the handover, until that is over
  bool opened_ = false;                              // `open` has succeeded before
  bool spares_ready_ = false;
  object_pool<collective_operation> spare_operation_; // for the next request of all ranks
};

/// Returns whether each device has a spare process.
bool keeps_spares(const world_limits& x) noexcept;

/// Returns the policy that `world_limits::on_loss` leads to.
loss_policy loss_policy_of(const world_limits& x) noexcept;

/// Returns the same world with a reference count of its own, to avoid contention of all ranks.
inline std::shared_ptr<world_core> counted_apart(const std::shared_ptr<world_core>& x) {
  return {std::make_shared<std::shared_ptr<world_core>>(x), x.get()};
}

} // namespace troupe::detail
