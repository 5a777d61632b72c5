/// The operation of a collective, a message or a group, with a part for each rank.
#pragma once

#include "collective/rank_call.hpp"
#include "foundation/rank_set.hpp"
#include "operation/operation.hpp"
#include "operation/room.hpp"
#include <troupe/backend.hpp>
#include <troupe/collective.hpp>
#include <troupe/error.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace troupe::detail {

class collective_world;
class communicator;
class rank_request;

/// One collective, message or group, with a part for each rank that takes part. It is requested by
/// one request, or by one request of each rank.
class collective_operation : public operation_of<collective_done> {
public:
  /// For the world without the ranks in `absent`. `calls` is sorted by rank and not empty; the
  /// handles of its ranges live until the constructor returns.
  collective_operation(const char* verb, std::shared_ptr<collective_world> world,
                       std::vector<rank_call> calls, std::uint64_t membership, rank_set absent);
  /// The same with one call of each rank, for an operation with these uses instead of the calls'.
  collective_operation(const char* verb, std::shared_ptr<collective_world> world,
                       std::vector<rank_call> calls, std::uint64_t membership,
                       std::span<const use> uses);
  /// Requested by one request of each rank that takes part in `any_call`, none of which is in
  /// `absent`.
  collective_operation(locked lock, std::shared_ptr<collective_world> world,
                       const rank_call& any_call, rank_set absent);
  /// Made in advance with a call of each rank of this process; `begin` starts it. `world` outlives
  /// it.
  explicit collective_operation(collective_world& world);
  /// Returns the storage for the calls of one request, before `begin`.
  std::vector<rank_call> room_for_calls() noexcept {
    room_.clear();
    return std::move(room_);
  }
  void make_room_for_calls() { room_.reserve(parts().size()); }
  /// Starts an operation that was made in advance: one request has a call for each rank.
  void begin(const char* verb, std::shared_ptr<collective_world> world,
             std::vector<rank_call> calls, std::uint64_t membership);
  /// The same for one request of each rank; this is the first one.
  void begin(locked lock, std::shared_ptr<collective_world> world, const rank_call& any_call);

  /// Checks one rank's call against the others.
  /// @errors errc::collective_mismatch, membership_changed: it does not match the others;
  ///         errc::invalid_argument: both ends of a message are in the same memory
  caf::error check_call(locked, const rank_call& call, std::span<const use> uses,
                        std::uint64_t membership) const;
  /// Adds `call`, which `asked_by` made.
  void add_call(locked, const rank_call& call, std::span<use> uses, std::uint64_t membership,
                std::shared_ptr<rank_request> asked_by);
  /// Returns the world's membership at the time of the first rank's call.
  std::uint64_t first_membership() const noexcept { return first_membership_; }
  /// Returns the ranks that have not called yet.
  std::string missing_ranks(locked) const;
  room_maker maker_of_calls(locked) const override;
  caf::error on_check(locked lock) const override;
  caf::error on_admit(locked lock, queue_bound bound) override;
  void on_refuse(locked) noexcept override { wait_no_more(); }
  const void* waits_for(locked lock) const override;
  caf::expected<issue_outcome> issue(part& p, lane& on) override;
  caf::error mark_end(part& p, event_view event, stream_view stream,
                      backend_device& device) override;
  bool writes_to_peers() const noexcept override { return way_ == collective_way::direct; }
  bool has_parts_elsewhere() const noexcept override;
  void on_lost_part(part& p, const caf::error& why) noexcept override;
  /// Returns the error that ends a communicator because this operation, which was to run on it,
  /// never will, for the reason `why`.
  caf::error end_of_communicator(std::uint64_t epoch, const caf::error& why) const;
  void on_part_done(part& p) noexcept override;
  bool on_stall() noexcept override;
  /// Lets it run on `target`, in the streams of its ranks.
  void run_on(std::shared_ptr<communicator> target, step_position where = {});
  const void* communicator_key() const noexcept override { return communicator_key_.load(); }

protected:
  bool is_held_up() const noexcept;
  const std::shared_ptr<communicator>& target() const noexcept { return communicator_; }
  void on_submit(locked lock) override;
  void before_answer(const caf::error& error) noexcept override;
  void after_answer() noexcept override;
  void describe_to(flight_entry& x, const part& p) const noexcept override;
  void on_settled() noexcept override;

private:
  using call_view = std::span<const rank_call* const>;

  /// Returns the calls of a part, in order. None is null once the operation is on the lanes.
  call_view calls_of(const part& p) const noexcept;
  /// Returns the index of the first call of `p`, and the number of its calls.
  std::pair<std::size_t, std::size_t> slots_of(const part& p) const noexcept;
  /// Returns the first call of `p`, once the operation is on the lanes.
  static const rank_call& first_call_of(const part& p) noexcept;
  bool moves_nothing(const part& p) const noexcept;
  /// Returns the requests that made the calls of `p`; empty if one request made all calls.
  std::span<const std::shared_ptr<rank_request>> requests_of(const part& p) const noexcept;
  void tell(part& p) noexcept;
  void wait_no_more() noexcept;
  void of_ranks(locked lock, std::shared_ptr<collective_world> world, const rank_call& any_call);
  void expect_calls(std::size_t number);
  void place_part(part& p, std::size_t rank, const collective_world& world);
  void take(std::vector<rank_call> calls);
  void add_all_uses();
  bool waits_for_world(locked lock) const;
  caf::expected<issue_outcome> issue_shrunk(part& p, lane& on);

  // Members that a lane reads to issue its part, kept together.
  std::shared_ptr<collective_world> world_;
  bool one_each_ = false; // each part has one call, the one in `part::needs`
  connect_scope needed_connections_ = connect_scope::collectives;
  collective_way way_ = collective_way::nccl;
  std::shared_ptr<communicator> communicator_;
  step_position in_step_;
  std::vector<const rank_call*> calls_; // sorted by rank; null: its rank has not called yet
  std::vector<std::size_t> ends_;       // of each part's calls in `calls_`
  /// The request that made each call, if ranks made them. The entries that a lane needs are set
  /// before the lane gets the part.
  std::vector<std::shared_ptr<rank_request>> requests_;
  std::vector<rank_call> room_; // storage of the calls, if one request made them all
  std::uint64_t membership_ = 0;
  std::uint64_t first_membership_ = 0;
  std::uint64_t absence_changes_ = 0; // `collective_world::absence_changes` at the first call
  const rank_set absent_;
  std::size_t missing_ = 0;          // calls that are still to come; under the admission lock
  std::atomic<bool> waiting_{false}; // counted in the queue of its world
  std::atomic<const void*> communicator_key_{nullptr}; // other threads read it while it waits
  std::shared_ptr<communicator> former_; // on which it would have run when it got its position

  // Members that lanes change.
  std::mutex requests_mutex_;
  bool requests_told_ = false; // `after_answer` has taken them; under requests_mutex_
  bool requests_done_ = false; // no lane needs them any more; under requests_mutex_
};

} // namespace troupe::detail
