#include "collective/communicator_errors.hpp"

#include "collective/communicator.hpp"
#include "lane/lane.hpp"              // for state()
#include "operation/device_state.hpp" // for ordinal()

#include <algorithm>
#include <string>
#include <utility>

namespace troupe::detail {

namespace {
/// Returns why a communicator ends because of part `p` of `op`.
failure end_of(const operation& op, const part& p, std::uint64_t epoch, errc code,
               std::string detail) {
  auto x = op.describe(code, std::move(detail));
  x.rank = p.rank;
  x.device = p.on->state().ordinal();
  x.generation = p.on->state().generation();
  x.epoch = epoch;
  return x;
}
} // namespace

caf::error after_call(const operation& op, const part& p, communicator& on, caf::error error) {
  auto cause = failure_of(error);
  if (!cause ||
      (severity_of(cause->code) != severity::communicator && cause->code != errc::out_of_memory))
    return error;
  auto x = end_of(op, p, on.epoch(), cause->code, std::move(cause->detail));
  x.api = std::move(cause->api);
  x.native_name = std::move(cause->native_name);
  x.native_code = cause->native_code;
  on.fail_unless_lost(make_error(std::move(x)));
  return on.dead();
}

caf::expected<issue_outcome> issued(operation& op, const part& p, communicator& on,
                                    caf::error error) {
  error = after_call(op, p, on, std::move(error));
  if (error && !on.live())
    op.fail(on.dead()); // all pending operations on it get the same cause (INV-7)
  if (error)
    return error;
  return issue_outcome::enqueued;
}

caf::error loss_error(const operation& op, const part& p, std::uint64_t epoch, caf::error why) {
  if (!why)
    why = op.cause();
  auto cause = failure_of(why);
  if (cause && severity_of(cause->code) >= severity::communicator)
    return why;
  std::string detail = op.has_parts_elsewhere() && !op.any_issued()
                           ? "a rank's call was not issued, and others may be"
                           : "a rank could not be issued after others had been";
  if (why)
    detail += ": " + troupe::describe(why);
  auto x = end_of(op, p, epoch, errc::rank_not_issued, std::move(detail));
  if (cause) {
    x.api = cause->api;
    x.native_name = cause->native_name;
    x.native_code = cause->native_code;
  }
  return make_error(std::move(x));
}

caf::error stall_error(const operation& op, std::uint64_t epoch) {
  auto x = op.describe(errc::stalled, "not done " + std::to_string(op.stall_limit / 1'000'000) +
                                          " ms after its first rank started");
  x.epoch = epoch;
  // Name the one rank that is behind all others, if there is exactly one.
  auto least = std::min_element(x.parts.begin(), x.parts.end());
  if (std::count(x.parts.begin(), x.parts.end(), *least) == 1) {
    x.rank = static_cast<int>(least - x.parts.begin());
    for (auto& p : op.parts())
      if (p.rank == x.rank) {
        x.device = p.on->state().ordinal();
        x.generation = p.on->state().generation();
      }
  }
  return make_error(std::move(x));
}

} // namespace troupe::detail
