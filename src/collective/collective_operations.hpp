/// The operations of a world: collectives, connecting a communicator, and memory on all ranks.
#pragma once

#include "admission/admission.hpp"
#include "collective/communicator.hpp"
#include "collective/rank_call.hpp"
#include "device/operations.hpp"
#include "foundation/rank_set.hpp"
#include "operation/operation.hpp"
#include "operation/symmetric_memory.hpp"
#include <troupe/collective.hpp>
#include <troupe/nccl_world.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace troupe::detail {

class rank_request;
class collective_world;
struct place_lines;

/// One collective, message or group, with a part for each rank that takes part. It is requested by
/// one request, or by one request of each rank.
class collective_operation final : public operation_of<collective_done> {
public:
  /// For the world without the ranks in `absent`. `calls` is sorted by rank and not empty; the
  /// handles of its ranges live until the constructor returns.
  collective_operation(const char* verb, std::shared_ptr<collective_world> world,
                       std::vector<rank_call> calls, std::uint64_t membership, rank_set absent);
  /// Requested by one request of each rank that takes part in `any_call`, none of which is in
  /// `absent`.
  collective_operation(std::shared_ptr<collective_world> world, const rank_call& any_call,
                       rank_set absent);
  /// Made in advance with a call of each rank of this process; `begin` starts it. `world` outlives
  /// it.
  explicit collective_operation(collective_world& world);
  /// Returns the storage for the calls of one request, before `begin`.
  std::vector<rank_call> room_for_calls() noexcept { return std::move(room_); }
  void make_room_for_calls() { room_.reserve(parts().size()); }
  /// Starts an operation that was made in advance: one request has a call for each rank.
  void begin(const char* verb, std::shared_ptr<collective_world> world,
             std::vector<rank_call> calls, std::uint64_t membership);
  /// The same for one request of each rank; this is the first one.
  void begin(std::shared_ptr<collective_world> world, const rank_call& any_call);

  /// Checks one rank's call against the others. Under the admission lock.
  /// @errors errc::collective_mismatch, membership_changed: it does not match the others;
  ///         errc::invalid_argument: both ends of a message are in the same memory
  caf::error check_call(const rank_call& call, std::span<const use> uses,
                        std::uint64_t membership) const;
  /// Adds `call`, which `asked_by` made.
  void add_call(const rank_call& call, std::span<use> uses, std::uint64_t membership,
                std::shared_ptr<rank_request> asked_by);
  /// Stores the addresses that `fetch_place` prefetches.
  void show(place_lines& to) const noexcept;
  /// Prefetches the memory that placing `ranks` calls changes into the cache of the calling thread.
  static void fetch_place(const place_lines& x, std::size_t ranks) noexcept;
  /// Returns the world's membership at the time of the first rank's call.
  std::uint64_t made_in() const noexcept { return made_in_; }
  /// Returns the ranks that have not called yet. Under the admission lock.
  std::string missing_ranks() const;
  room_maker maker_of_calls() const override;
  caf::error on_check() const override;
  caf::error on_admit(queue_bound bound) override;
  const void* waits_for() const override;
  caf::expected<issue_outcome> issue(part& p, lane& on) override;
  bool has_parts_elsewhere() const noexcept override;
  void on_lost_part(part& p, const caf::error& why) noexcept override;
  /// Returns the error that ends a communicator because this operation, which was to run on it,
  /// never will, for the reason `why`.
  caf::error end_of_communicator(std::uint64_t epoch, const caf::error& why) const;
  caf::expected<issue_outcome> proceed(part& p, lane& on) override;
  bool lets_pass() noexcept override;
  void fetch_answer(const part& p) const noexcept override;
  void on_part_done(part& p) noexcept override;
  void on_part_over(part& p) noexcept override;
  bool answer_ahead() noexcept override;
  bool on_stall() noexcept override;
  const void* communicator_key() const noexcept override { return communicator_key_.load(); }

protected:
  void on_submit() override;
  void before_answer(const caf::error& error) noexcept override;
  void after_answer() noexcept override;
  void describe_to(flight_entry& x, const part& p) const noexcept override;
  void on_settled() noexcept override;

private:
  using call_view = std::span<const rank_call* const>;
  enum class way : std::uint8_t { open, plain, symmetric };

  /// Returns the calls of a part, in order. None is null once the operation is on the lanes.
  call_view calls_of(const part& p) const noexcept;
  /// Returns the index of the first call of `p`, and the number of its calls.
  std::pair<std::size_t, std::size_t> places_of(const part& p) const noexcept;
  /// Returns the first call of `p`, once the operation is on the lanes.
  static const rank_call& first_call_of(const part& p) noexcept;
  bool moves_nothing(const part& p) const noexcept;
  /// Returns the requests that made the calls of `p`; empty if one request made all calls.
  std::span<const std::shared_ptr<rank_request>> requests_of(const part& p) const noexcept;
  void tell(part& p) noexcept;
  void wait_no_more() noexcept;
  void of_ranks(std::shared_ptr<collective_world> world, const rank_call& any_call);
  void expect_calls(std::size_t number);
  void place_part(part& p, std::size_t rank, const collective_world& world);
  void take(std::vector<rank_call> calls);
  void add_all_uses();
  void run_on(std::shared_ptr<communicator> target);
  bool is_held_up() const noexcept;
  bool waits_for_world() const;
  void vote(bool yes) noexcept;
  bool decide(way x) noexcept;
  void decide_at_once() noexcept;
  static void resume_frees(part& p) noexcept;
  caf::expected<issue_outcome> issue(part& p, lane& on, bool symmetric);
  caf::expected<issue_outcome> issue_shrunk(part& p, lane& on);

  // Members that a lane reads to issue its part, kept together.
  std::shared_ptr<collective_world> world_;
  /// If a symmetric call begins on one rank and never on another, it never ends. So all lanes must
  /// have reached the operation, with nothing in its way, before one lane issues it: each lane
  /// votes yes or no (`decision_`). With the first no, all ranks use the plain call.
  bool may_be_symmetric_ = false;
  bool one_each_ = false; // each part has one call, the one in `part::needs`
  connect_scope needs_ = connect_scope::collectives;
  std::shared_ptr<communicator> communicator_;
  std::vector<const rank_call*> calls_; // sorted by rank; null: its rank has not called yet
  std::vector<std::size_t> ends_;       // of each part's calls in `calls_`
  /// The request that made each call, if ranks made them. The entries that a lane needs are set
  /// before the lane gets the part.
  std::vector<std::shared_ptr<rank_request>> requests_;
  std::vector<rank_call> room_; // storage of the calls, if one request made them all
  std::uint64_t membership_ = 0;
  std::uint64_t made_in_ = 0;
  std::uint64_t made_for_ = 0; // `collective_world::absences` at the first call
  const rank_set absent_;
  std::size_t missing_ = 0;          // calls that are still to come; under the admission lock
  std::atomic<bool> waiting_{false}; // counted in the queue of its world
  std::atomic<const void*> communicator_key_{nullptr}; // other threads read it while it waits
  std::shared_ptr<communicator> former_; // on which it would have run when it got its position

  // Members that lanes change.
  std::atomic<std::size_t> agreed_{0}; // number of yes votes; lanes that wait read only `decision_`
  std::atomic<bool> untold_{false};    // a request completed before its part was done
  std::mutex requests_mutex_;
  bool requests_told_ = false; // `after_answer` has taken them; under requests_mutex_
  bool requests_done_ = false; // no lane needs them any more; under requests_mutex_
  std::atomic<way> decision_{way::open};
};

/// One rank's request for an operation that all ranks request, and from which it gets its result.
class rank_request final : public operation_of<collective_done>, public rank_submission {
public:
  /// Made in advance; `begin` starts it.
  rank_request() : operation_of("", 0) {}
  /// Starts a request for the world without the ranks in `absent`.
  void begin(const char* verb, std::shared_ptr<collective_world> world, rank_call call,
             rank_set absent, const request_options& options);
  std::uint64_t number() const noexcept override;
  collective_kind what() const noexcept { return call_.call.what; }
  std::int32_t peer() const noexcept { return call_.call.peer; }
  caf::expected<operation*> joint() override;
  caf::expected<operation*> alone(queue_bound bound) override;
  void count_refused(const caf::error& why) override;
  std::span<const use> uses() const override { return {uses_.data(), use_count_}; }
  void fetch_ahead() const noexcept override;
  const void* match_key() const noexcept override;
  std::shared_ptr<operation> whole(std::span<rank_submission* const> all) override;
  void join_whole(std::span<rank_submission* const> all,
                  const std::shared_ptr<operation>& joint) override;
  bool join(std::shared_ptr<operation> self) override;
  caf::error refuse_cycle() override;
  void placed(const caf::error& why) override;
  /// Waits for room, as `room` says, and enqueues the request. A refusal becomes its reply.
  void start(room_policy room);
  /// The same together with other requests of its rank, for `admission::place_together`; `before`
  /// of them precede it in its call queue. Call `watch` afterwards.
  admission::submission begin_together(std::size_t before);
  void watch();
  /// Completes the request: its rank's part is done. Returns false if it was completed before.
  bool succeed(const collective_done& value_of_all) noexcept;
  /// Completes the request with the result of its completed operation, unless it has a reply
  /// already.
  void end() noexcept;
  /// Returns which threads make room for the request. Under the admission lock.
  room_maker who_makes_room(queue_bound bound) const;
  /// Notes that the request was refused with `why` before it was enqueued. Under the admission
  /// lock. Call `end_refused` afterwards.
  void note_refused(const caf::error& why);
  void end_refused(const caf::error& why);
  /// Ends the request with its exchange: the requester ended that, or another message of it failed.
  void end_beside(early_end how, const caf::error& why) noexcept;

protected:
  void end_early(early_end how) noexcept override;

private:
  /// Returns the memory that placing needs, without the buffers of the uses.
  std::span<const std::byte> placing_lines() const noexcept;
  void become_part_of(std::shared_ptr<collective_operation> joint, std::shared_ptr<operation> self);
  failure describe_call(errc code, std::string detail) const;
  void end_early(early_end how, errc code, const std::string& detail) noexcept;
  std::shared_ptr<collective_operation> make_joint();
  caf::error check_line(std::size_t ahead, queue_bound bound) const;
  caf::error check_room(queue_bound bound) const;
  caf::error wait_for_room(room_policy room);
  const lane& own_lane() const;

  // Members that placing needs, kept together, from `rank_submission` on.
  std::uint64_t membership_ = 0;
  rank_set absent_;
  std::shared_ptr<collective_world> world_;
  std::shared_ptr<collective_operation> joint_; // its operation; under the admission lock
  std::atomic<std::uint64_t> joint_number_{0};
  std::uint32_t use_count_ = 0;
  bool counts_ = false; // among the calls of its rank
  std::array<use, 2> uses_;
  rank_call call_; // the operation refers to it

  std::shared_ptr<collective_operation> found_; // the operation that it may join
  std::shared_ptr<collective_operation> ended_; // the one that its refusal ended, for all ranks
  std::size_t before_ = 0;                      // others of its exchange before it in its queue
  std::shared_ptr<collective_operation> made_;  // made in advance, for `found_`
};

/// Several requests of one rank that get their positions in one step and complete together: when
/// all are done, or with the first that fails. A failure ends the other requests.
class exchange_request final : public operation_of<collective_done> {
public:
  /// `requests`: requests for messages, not started yet, in order.
  exchange_request(std::shared_ptr<runtime> owner,
                   std::vector<std::shared_ptr<rank_request>> requests);
  /// Gives all requests their positions, or refuses all of them.
  void start(room_policy room);

protected:
  void end_early(early_end how) noexcept override;

private:
  void on_answer_of(const rank_request& x) noexcept;
  void end_all(early_end how, const caf::error& why) noexcept;

  const std::shared_ptr<runtime> owner_;
  const std::vector<std::shared_ptr<rank_request>> requests_;
  std::atomic<std::size_t> left_;
};

/// Connects a communicator, in the order of all other work on its devices. The call blocks until
/// every rank is in it. Other collectives on the devices, above all a stalled one, can block it
/// there. So the lanes wait for each other, and for those collectives to be over, before they make
/// the call. From the operation's turn until then a lane issues nothing else.
///
/// There is no deadlock with the work of other communicators. All lanes have all operations in one
/// order. An operation that comes before this one is on all its lanes, or gets there first, and
/// waits for nothing that comes later. So it ends at some time, or its own limit ends it, which
/// needs no lane. An operation that comes later waits. If several operations connect on overlapping
/// lanes, the first in order finds its lanes free of the others.
class connect_operation : public operation_of<nothing> {
public:
  /// The communicator ends if the lanes are not free within `patience`, or if a call does not
  /// return within `limit`.
  connect_operation(std::shared_ptr<communicator> target, connect_scope what,
                    std::chrono::nanoseconds patience, std::chrono::nanoseconds limit);
  bool bounded() const noexcept override { return false; }
  bool holds_lane() const noexcept override { return true; }
  caf::expected<issue_outcome> issue(part& p, lane& on) override;
  caf::expected<issue_outcome> proceed(part& p, lane& on) override;
  void on_lost_part(part& p, const caf::error& why) noexcept override;
  bool on_stall() noexcept override;
  const void* communicator_key() const noexcept override { return communicator_.get(); }

  world_tag world; ///< for the flight record

protected:
  connect_operation(const char* verb, std::shared_ptr<communicator> target, connect_scope what,
                    std::chrono::nanoseconds patience, std::chrono::nanoseconds limit);
  /// Makes the call that blocks until every rank is in it.
  virtual caf::error call(part& p, backend_communicator& rank, stream_view stream);
  /// Returns false if the communicator ends when the lanes do not reach the operation in time.
  virtual bool may_give_up() const noexcept { return false; }
  communicator& target() noexcept { return *communicator_; }
  void describe_to(flight_entry& x, const part& p) const noexcept override;
  void on_settled() noexcept override;

private:
  enum class turn : std::uint8_t { to_come, there, given_up };

  const std::shared_ptr<communicator> communicator_;
  const connect_scope what_;
  const std::chrono::nanoseconds limit_;
  std::atomic<turn> turn_{turn::to_come};
  std::vector<char> has_arrived_; // of each part; only its lane uses it
  std::atomic<std::size_t> arrived_{0};
  std::atomic<std::int64_t> held_since_{0};
  std::atomic<std::int64_t> entered_at_{0};
};

/// Registers memory windows of a communicator, in the same way as `connect_operation` connects one:
/// the call blocks too, and CUDA may wait in it for running kernels. If a rank cannot register, the
/// operation fails, but the communicator does not end.
class register_operation final : public connect_operation {
public:
  register_operation(std::shared_ptr<communicator> target, std::chrono::nanoseconds patience,
                     std::chrono::nanoseconds limit,
                     std::vector<std::shared_ptr<symmetric_memory>> memory);
  void on_lost_part(part& p, const caf::error& why) noexcept override;

protected:
  caf::error call(part& p, backend_communicator& rank, stream_view stream) override;
  bool may_give_up() const noexcept override { return true; }

private:
  const std::vector<std::shared_ptr<symmetric_memory>> memory_;
};

/// Deregisters windows on each rank when the operation's turn comes on its lane: it lies between
/// the same registrations on all ranks. Nothing uses the memory any more.
class deregister_operation final : public operation_of<nothing> {
public:
  deregister_operation(std::shared_ptr<communicator> target,
                       std::shared_ptr<symmetric_memory> memory);
  bool bounded() const noexcept override { return false; }
  caf::expected<issue_outcome> issue(part& p, lane& on) override;
  const void* communicator_key() const noexcept override { return communicator_.get(); }

private:
  const std::shared_ptr<communicator> communicator_;
  const std::shared_ptr<symmetric_memory> memory_;
};

/// Allocates memory on every rank of a world.
class allocate_all_operation final : public operation_of<world_buffers> {
public:
  /// For all ranks not in `absent`. `symmetric`: the allocation that gets the pieces; null: plain
  /// memory.
  allocate_all_operation(const std::vector<std::shared_ptr<lane>>& lanes, rank_set absent,
                         dtype type, std::size_t count, bool zeroed,
                         std::shared_ptr<symmetric_memory> symmetric);
  caf::expected<issue_outcome> issue(part& p, lane& on) override;

private:
  caf::expected<std::shared_ptr<buffer>> allocate(const part& p, lane& on, std::size_t bytes);

  const dtype type_;
  const std::size_t count_;
  const bool zeroed_;
  const std::shared_ptr<symmetric_memory> symmetric_;
};

} // namespace troupe::detail
