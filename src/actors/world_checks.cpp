#include "actors/world_checks.hpp"

#include "foundation/option_check.hpp"
#include "foundation/rank_set.hpp"
#include "world/world_core.hpp" // for loss_policy_of()

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

namespace troupe::detail {

caf::error check_limits(const world_limits& x, const std::vector<std::shared_ptr<lane>>& lanes,
                        bool with_program) {
  for (auto [name, limit] : {std::pair{"world_limits::deadline", x.deadline},
                             std::pair{"world_limits::build_deadline", x.build_deadline},
                             std::pair{"world_limits::connect_limit", x.connect_limit}})
    if (auto error = check_positive(name, limit); error)
      return error;
  for (auto [name, limit] : {std::pair{"world_limits::stall_limit", x.stall_limit},
                             std::pair{"world_limits::restart_window", x.restart_window}})
    if (auto error = check_not_negative(name, limit); error)
      return error;
  // In nanoseconds these could overflow.
  if (auto error = check_at_least("world_limits::quiet_limit", x.quiet_limit.count(), 1, "ms");
      error)
    return error;
  if (auto error =
          check_at_least("world_limits::restart_backoff", x.restart_backoff.count(), 0, "ms");
      error)
    return error;
  const auto on_loss = loss_policy_of(x);
  if (keeps_spares(x) != (on_loss == loss_policy::failover))
    return make_error(errc::invalid_argument,
                      "loss_policy::" + std::string{to_string(on_loss)} +
                          " is not for standby_policy::" + std::string{to_string(x.standby)} +
                          ": spares are for loss_policy::failover alone, which needs them");
  if (on_loss == loss_policy::shrink && lanes.size() > rank_set::most)
    return make_error(errc::invalid_argument, "a world that shrinks has at most " +
                                                  std::to_string(rank_set::most) + " ranks, not " +
                                                  std::to_string(lanes.size()));
  const bool remote =
      std::all_of(lanes.begin(), lanes.end(), [](auto& y) { return y->is_remote(); });
  if (!remote && with_program)
    return make_error(errc::not_supported,
                      "only ranks in worker processes are driven by programs of their own");
  if (!remote && on_loss == loss_policy::failover)
    return make_error(errc::not_supported,
                      "only devices in worker processes are lost, and have spares");
  return {};
}

caf::expected<collectives_policy> policy_for(collectives_policy wanted, const backend& by,
                                             const std::vector<std::shared_ptr<lane>>& lanes) {
  if (wanted > collectives_policy::automatic)
    return make_error(errc::invalid_argument, "world_config::collectives is no known policy");
  if (wanted == collectives_policy::nccl)
    return wanted;
  std::vector<int> ordinals;
  for (auto& x : lanes)
    ordinals.push_back(x->state().ordinal());
  const bool remote = std::ranges::any_of(lanes, [](auto& x) { return x->is_remote(); });
  if (by.can_be_direct(ordinals))
    return remote ? collectives_policy::direct : wanted; // no second communicator in workers
  if (wanted == collectives_policy::automatic)
    return collectives_policy::nccl;
  return make_error(errc::not_supported,
                    "collectives_policy::direct is for at most 8 devices of one host, which reach "
                    "each other's memory");
}

world_limits countable(world_limits x) {
  constexpr auto most = as_good_as_never;
  x.build_deadline = std::min<std::chrono::nanoseconds>(x.build_deadline, most);
  x.connect_limit = std::min<std::chrono::nanoseconds>(x.connect_limit, most);
  x.quiet_limit = std::min<std::chrono::milliseconds>(x.quiet_limit, most);
  x.restart_window = std::min<std::chrono::nanoseconds>(x.restart_window, most);
  x.restart_backoff = std::min<std::chrono::milliseconds>(x.restart_backoff, most / 1024);
  return x;
}

} // namespace troupe::detail
