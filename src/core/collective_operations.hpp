/// What a world does on its lanes: collectives, and connecting a communicator.
#pragma once

#include "core/admission.hpp"
#include "core/communicator.hpp"
#include "core/operation.hpp"
#include "core/operations.hpp"
#include "core/rank_call.hpp"
#include "core/rank_set.hpp"
#include "core/symmetric_memory.hpp"
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
class world_core;
struct place_lines;

/// One collective, message or group: a part for each rank that takes part. Asked for by one
/// request, or by one of each rank.
class collective_operation final : public operation_of<collective_done> {
public:
  /// `calls` is sorted by rank and not empty; what its ranges refer to lives until this returns.
  /// It is for the world without the ranks of `absent`.
  collective_operation(const char* verb, std::shared_ptr<world_core> world,
                       std::vector<rank_call> calls, std::uint64_t membership, rank_set absent);
  /// Asked for by one request of each rank that takes part in `any_call`, none of them of `absent`.
  collective_operation(std::shared_ptr<world_core> world, const rank_call& any_call,
                       rank_set absent);
  /// With a call of each rank of this process, to `begin` when it is asked for. `world` outlives
  /// it.
  explicit collective_operation(world_core& world);
  /// What the calls of one request are put into before that.
  std::vector<rank_call> room_for_calls() noexcept { return std::move(room_); }
  void make_room_for_calls() { room_.reserve(parts().size()); }
  /// By one request, for a call of each rank.
  void begin(const char* verb, std::shared_ptr<world_core> world, std::vector<rank_call> calls,
             std::uint64_t membership);
  /// By one request of each rank; this is the first.
  void begin(std::shared_ptr<world_core> world, const rank_call& any_call);

  /// One rank's request. Under the lock of the order.
  /// @errors errc::collective_mismatch, membership_changed: it does not go with the others
  caf::error check_call(const rank_call& call, std::span<const use> uses,
                        std::uint64_t membership) const;
  /// `call` is of `asked_by`.
  void add_call(const rank_call& call, std::span<use> uses, std::uint64_t membership,
                std::shared_ptr<rank_request> asked_by);
  /// Tells where `fetch_place` finds it.
  void show(place_lines& to) const noexcept;
  /// Brings what a place in the order changes, of `ranks` calls, into the cache of the calling
  /// thread.
  static void fetch_place(const place_lines& x, std::size_t ranks) noexcept;
  /// The world's membership when the first rank called.
  std::uint64_t made_in() const noexcept { return made_in_; }
  /// The ranks that have not called yet. Under the lock of the order.
  std::string missing_ranks() const;
  room_maker maker_of_calls() const override;
  caf::error on_check() const override;
  caf::error on_admit(queue_bound bound) override;
  const void* waits_for() const override;
  caf::expected<issue_outcome> issue(part& p, lane& on) override;
  bool has_parts_elsewhere() const noexcept override;
  void on_lost_part(part& p, const caf::error& why) noexcept override;
  /// Why a communicator ends on which this was to be, and never will: `why`.
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

  /// Those of a part, in their order. None is null once it is on the lanes.
  call_view calls_of(const part& p) const noexcept;
  /// Where they are: the first, and how many.
  std::pair<std::size_t, std::size_t> places_of(const part& p) const noexcept;
  /// On the lanes.
  static const rank_call& first_call_of(const part& p) noexcept;
  bool moves_nothing(const part& p) const noexcept;
  /// Who made them, if ranks did.
  std::span<const std::shared_ptr<rank_request>> requests_of(const part& p) const noexcept;
  void tell(part& p) noexcept;
  void wait_no_more() noexcept;
  void of_ranks(std::shared_ptr<world_core> world, const rank_call& any_call);
  void expect_calls(std::size_t number);
  void place_part(part& p, std::size_t rank, const world_core& world);
  void take(std::vector<rank_call> calls);
  void add_all_uses();
  void run_on(std::shared_ptr<communicator> target);
  bool is_held_up() const noexcept;
  bool waits_for_world() const;
  void vote(bool yes) noexcept;
  bool decide(way x) noexcept;
  void decide_at_once() noexcept;
  static void end_promise(part& p) noexcept;
  caf::expected<issue_outcome> issue(part& p, lane& on, bool symmetric);
  caf::expected<issue_outcome> issue_with_fewer_ranks(part& p, lane& on);

  // What a lane needs to issue its part, together.
  std::shared_ptr<world_core> world_;
  /// A symmetric call that has begun on a rank and never does on another stands still for good, so
  /// all lanes must have come to it, with nothing in its way, before one issues it: each says yes
  /// or no (`decision_`). With the first no it goes the plain way, on all ranks.
  bool may_be_symmetric_ = false;
  bool one_each_ = false; // each part has one call, which is what it `needs`
  connect_scope needs_ = connect_scope::collectives;
  std::shared_ptr<communicator> communicator_;
  std::vector<const rank_call*> calls_; // sorted by rank; null: its rank is still to call
  std::vector<std::size_t> ends_;       // of each part's calls
  /// Who made each call, if ranks made them; what a part's lane needs of it is there before the
  /// part.
  std::vector<std::shared_ptr<rank_request>> requests_;
  std::vector<rank_call> room_; // the calls, if one request made them all
  std::uint64_t membership_ = 0;
  std::uint64_t made_in_ = 0;
  std::uint64_t made_for_ = 0; // `world_core::absences`
  const rank_set absent_;
  std::size_t missing_ = 0;          // calls that are still to come; under the lock of the order
  std::atomic<bool> waiting_{false}; // counts at its world
  std::atomic<const void*> communicator_key_{nullptr}; // for those who look at it while it waits
  std::shared_ptr<communicator> former_; // on which it would have run when it got its place

  // What lanes change.
  std::atomic<std::size_t> agreed_{0}; // how many said yes; none looks here again
  std::atomic<bool> untold_{false};    // a request was answered before its part was done
  std::mutex requests_mutex_;
  bool requests_told_ = false; // of the end; under requests_mutex_
  bool requests_done_ = false; // no lane needs them any more; under requests_mutex_
  std::atomic<way> decision_{way::open};
};

/// One rank's request for an operation that all ranks ask for: it is answered with that operation.
class rank_request final : public operation_of<collective_done>, public joining {
public:
  /// To `begin` when it is asked for.
  rank_request() : operation_of("", 0) {}
  /// It is for the world without the ranks of `absent`.
  void begin(const char* verb, std::shared_ptr<world_core> world, rank_call call, rank_set absent,
             const request_options& options);
  std::uint64_t number() const noexcept override;
  collective_kind what() const noexcept { return call_.call.what; }
  std::int32_t peer() const noexcept { return call_.call.peer; }
  caf::expected<operation*> joint() override;
  caf::expected<operation*> alone(queue_bound bound) override;
  void count_refused(const caf::error& why) override;
  std::span<const use> uses() const override { return {uses_.data(), use_count_}; }
  void fetch_ahead() const noexcept override;
  const void* kin() const noexcept override;
  std::shared_ptr<operation> whole(std::span<joining* const> all) override;
  void join_whole(std::span<joining* const> all, const std::shared_ptr<operation>& joint) override;
  bool join(std::shared_ptr<operation> self) override;
  caf::error refuse_cycle() override;
  void placed(const caf::error& why) override;
  /// Waits until there is room for it, as `room` says, and hands it in; a refusal becomes its
  /// answer.
  void start(room_policy room);
  /// The same together with others of its rank, `before` of which come before it in its line: for
  /// `admission::place_together`. Then `watch`.
  admission::entrant begin_together(std::size_t before);
  void watch();
  /// Its rank's part is done. False if it was answered before.
  bool succeed(const collective_done& value_of_all) noexcept;
  /// The operation is answered; this is its answer too, if it has none.
  void end() noexcept;
  /// Returns which threads make room for it. Under the lock of the order.
  room_maker who_makes_room(queue_bound bound) const;
  /// Under the lock of the order: it was refused with `why` before it was handed in. Then
  /// `end_refused`.
  void note_refused(const caf::error& why);
  void end_refused(const caf::error& why);
  /// Its exchange ends: because of its requester, or because another message of it failed.
  void end_beside(early_end how, const caf::error& why) noexcept;

protected:
  void end_early(early_end how) noexcept override;

private:
  /// What a place in the order takes, without the uses' buffers.
  std::span<const std::byte> placing_lines() const noexcept;
  void become_part_of(std::shared_ptr<collective_operation> joint, std::shared_ptr<operation> self);
  failure describe_call(errc code, std::string detail) const;
  void end_early(early_end how, errc code, const std::string& detail) noexcept;
  std::shared_ptr<collective_operation> make_joint();
  caf::error check_line(std::size_t ahead, queue_bound bound) const;
  caf::error check_room(queue_bound bound) const;
  caf::error wait_for_room(room_policy room);
  const lane& own_lane() const;

  // What a place in the order takes, together, from `joining` on.
  std::uint64_t membership_ = 0;
  rank_set absent_;
  std::shared_ptr<world_core> world_;
  std::shared_ptr<collective_operation> joint_; // what it is a part of; under the lock of the order
  std::atomic<std::uint64_t> joint_number_{0};
  std::uint32_t use_count_ = 0;
  bool counts_ = false; // among its rank's calls
  std::array<use, 2> uses_;
  rank_call call_; // the operation's, too

  std::shared_ptr<collective_operation> found_; // what it may become a part of
  std::shared_ptr<collective_operation> ended_; // by its refusal, for all ranks
  std::size_t before_ = 0;                      // of those that come with it, in its line
  std::shared_ptr<collective_operation> made_;  // ahead, to become that
};

/// Several requests of one rank that have their places in one step, and are answered together: when
/// all are done, or with the first that failed. The others are taken back then.
class exchange_request final : public operation_of<collective_done> {
public:
  /// `requests`: of messages, not started yet, in their order.
  exchange_request(std::shared_ptr<runtime> owner,
                   std::vector<std::shared_ptr<rank_request>> requests);
  /// Gives all of them their places, or refuses them as a whole.
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

/// Makes connections of a communicator, in the order of all other work on its devices. The
/// call blocks until every rank is in it, and other collectives on the devices, one that stands
/// still above all, can keep it there: so the lanes wait for each other, and for those collectives
/// to be over, before they make it. From its turn on until then a lane issues nothing else.
///
/// Other communicators' work cannot wait for it in a circle. All lanes have all operations in one
/// order. What comes before it is on all its lanes, or comes there first, and waits for nothing
/// that comes later; so it is over some time, or its own limit ends it, for which no lane is
/// needed. What comes later waits. Of several that connect on overlapping lanes the first in order
/// finds its lanes free of the others.
class connect_operation : public operation_of<nothing> {
public:
  /// Ends the communicator if the lanes are not free within `patience`, or a call does not come
  /// back within `limit`.
  connect_operation(std::shared_ptr<communicator> target, connect_scope what,
                    std::chrono::nanoseconds patience, std::chrono::nanoseconds limit);
  bool bounded() const noexcept override { return false; }
  bool holds_lane() const noexcept override { return true; }
  caf::expected<issue_outcome> issue(part& p, lane& on) override;
  caf::expected<issue_outcome> proceed(part& p, lane& on) override;
  void on_lost_part(part& p, const caf::error& why) noexcept override;
  bool on_stall() noexcept override;
  const void* communicator_key() const noexcept override { return communicator_.get(); }

  world_tag world; ///< for the record

protected:
  connect_operation(const char* verb, std::shared_ptr<communicator> target, connect_scope what,
                    std::chrono::nanoseconds patience, std::chrono::nanoseconds limit);
  /// What blocks until every rank is in it.
  virtual caf::error call(part& p, backend_communicator& rank, stream_view stream);
  /// False: that the lanes do not come to it ends the communicator.
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
  std::vector<char> has_arrived_; // of each part, its lane's
  std::atomic<std::size_t> arrived_{0};
  std::atomic<std::int64_t> held_since_{0};
  std::atomic<std::int64_t> entered_at_{0};
};

/// Makes memory windows of a communicator, as `connect_operation` connects one: it blocks as well,
/// and what it has CUDA do may wait for kernels that are at work. That a rank cannot is its answer,
/// and not the end of the communicator.
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

/// Undoes it, on each rank when its lane comes by: it comes between the same registrations on all
/// of them. Nothing uses the memory any more.
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

/// Memory on every rank of a world.
class allocate_all_operation final : public operation_of<world_buffers> {
public:
  /// On all ranks but those of `absent`. `symmetric`: whose pieces it is to be; none: plain memory.
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
