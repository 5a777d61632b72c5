/// `world_core`: its status, its members, and the checks of requests against them.
#include "world/world_core.hpp"

#include "foundation/error_text.hpp"
#include "operation/admission_lock.hpp"

#include <algorithm>
#include <utility>

namespace troupe::detail {

bool keeps_spares(const world_limits& x) noexcept {
  return x.standby == standby_policy::spares || x.standby == standby_policy::full;
}

loss_policy loss_policy_of(const world_limits& x) noexcept {
  if (x.on_loss != loss_policy::automatic)
    return x.on_loss;
  return keeps_spares(x) ? loss_policy::failover : loss_policy::rebuild;
}

world_core::world_core(std::shared_ptr<runtime> runtime, std::string name,
                       std::vector<std::shared_ptr<lane>> lanes, const world_limits& limits,
                       collectives_policy wanted, collectives_policy collectives,
                       const std::optional<way_table>& ways)
    : collective_world(std::move(runtime), name, std::move(lanes), limits), name_(std::move(name)),
      on_loss_(loss_policy_of(limits)), wanted_collectives_(wanted), collectives_(collectives),
      wanted_ways_(ways), ways_(ways ? *ways : way_table::built_in(lanes_.size())),
      prepared_(lanes_.size()) {}

world_core::~world_core() = default;

std::size_t world_core::rank_of(int device) const noexcept {
  const auto at = std::find_if(lanes_.begin(), lanes_.end(),
                               [=](auto& x) { return x && x->state().ordinal() == device; });
  return static_cast<std::size_t>(at - lanes_.begin());
}

world_status world_core::status(locked lock) const {
  return {name_, phase_, epoch_, membership_, members_, reason_, has_standby(lock)};
}

std::vector<world_member> world_core::members_without(locked, rank_set absent) const {
  std::vector<world_member> result;
  for (std::size_t i = 0; i < lanes_.size(); ++i)
    if (!absent.contains(i))
      result.push_back({static_cast<int>(i), lanes_[i]->state().ordinal(),
                        lanes_[i]->state().generation(), lanes_[i]->state().incarnation()});
  return result;
}

std::vector<local_rank> world_core::ranks_without(rank_set absent) const {
  std::vector<local_rank> result;
  for (std::size_t i = 0; i < lanes_.size(); ++i)
    if (!absent.contains(i))
      result.push_back({static_cast<int>(result.size()), lanes_[i]->state().ordinal()});
  return result;
}

bool world_core::is_ready(rank_set absent) const {
  for (std::size_t i = 0; i < lanes_.size(); ++i)
    if (!absent.contains(i) && lanes_[i]->state().phase() != device_phase::ready)
      return false;
  return true;
}

// -- checks of requests

failure world_core::refusal_of(locked, const operation& op, errc code, std::string detail) const {
  auto why = op.describe(code, std::move(detail));
  why.epoch = epoch_;
  why.parts.clear();
  return why;
}

caf::error world_core::check_view(locked lock, const operation& op, std::uint64_t membership,
                                  rank_set absent) const {
  auto refusal = [&](errc code, std::string detail) {
    return refusal_of(lock, op, code, std::move(detail));
  };
  if (phase_ == world_phase::failed || phase_ == world_phase::shut_down) {
    if (op.position() != 0 && reason_) // what was pending gets the one cause (INV-7)
      return reason_;
    return make_error(
        refusal(errc::unavailable, "the world is " + std::string{to_string(phase_)} +
                                       (reason_ ? ": " + describe(reason_) : std::string{})));
  }
  if (membership == 0 && !is_whole() && first_epoch_ != 0 &&
      (epoch_ != first_epoch_ || !has_communicator()))
    return caf::make_error(
        errc::membership_changed,
        refusal(errc::membership_changed,
                "a communicator of the world has ended, and each rank knows only the number of "
                "its own calls: set request_options::membership"),
        status(lock));
  if (membership != 0 && membership != membership_)
    return caf::make_error(errc::membership_changed,
                           refusal(errc::membership_changed,
                                   "the world has membership " + std::to_string(membership_) +
                                       " now, not " + std::to_string(membership)),
                           status(lock));
  if (absent != this->absent())
    return caf::make_error(
        errc::membership_changed,
        refusal(errc::membership_changed, "the world has " + std::to_string(members_.size()) +
                                              " of its " + std::to_string(size()) +
                                              " ranks now, and the request was for " +
                                              std::to_string(size() - absent.size())),
        status(lock));
  return {};
}

caf::error world_core::check_ranks_since(locked lock, const operation& op,
                                         std::uint64_t absence_changes) const {
  if (absence_changes == absence_changes_)
    return {};
  return caf::make_error(errc::membership_changed,
                         refusal_of(lock, op, errc::membership_changed,
                                    "ranks have left the world or returned since then"),
                         status(lock));
}

caf::error world_core::check_view(const char* verb, std::uint64_t membership) const {
  const operation request{verb, 0};
  admission_lock lock;
  return check_view(lock, request, membership, absent());
}

caf::error world_core::enter_queue(locked lock, const operation& op, queue_bound bound) {
  const auto limit = limit_of(limits_.waiting_limit, bound);
  if (waiting_.fetch_add(1) < limit)
    return {};
  waiting_.fetch_sub(1);
  return make_error(refusal_of(lock, op, errc::overloaded,
                               std::to_string(limit) + " requests already wait for the world"));
}

bool world_core::counts_calls_of(locked, const rank_end& x) const noexcept {
  const auto without = absent();
  return phase_ <= world_phase::ready && !without.contains(x.rank) &&
         (!x.is_message() || (x.peer < size() && !without.contains(x.peer)));
}

caf::error world_core::why_no_device_of(std::size_t rank) const {
  const auto number = static_cast<std::int64_t>(rank);
  return make_error(errc::invalid_argument,
                    rank >= size()
                        ? out_of_range("rank", number, size())
                        : "the device of rank " + std::to_string(rank) + " is in another process");
}

} // namespace troupe::detail
