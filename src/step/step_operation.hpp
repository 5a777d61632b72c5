/// One run of a step as one operation.
#pragma once

#include "collective/collective_operation.hpp"
#include "step/bound_step.hpp"

#include <memory>

namespace troupe::detail {

/// All requests of a step, with a part for each rank. A rank enqueues them in their order in the
/// stream of its communicator: the first time one by one, which also loads their code; from then on
/// as a graph.
class step_operation final : public collective_operation {
public:
  /// @errors as for a barrier of the world
  static caf::expected<std::shared_ptr<step_operation>> make(std::shared_ptr<const bound_step> what,
                                                             step_place where);

  step_operation(std::shared_ptr<const bound_step> what, step_place where,
                 std::vector<rank_call> calls);
  caf::expected<issue_outcome> issue(part& p, lane& on) override;

private:
  enum class mode { runs, records };

  caf::error enqueue(part& p, lane& on, mode how);
  static caf::error enqueue_request(part& p, lane& on, operation& op);
  caf::error record(part& p, lane& on, rank_graph& to);
  caf::error replay(part& p, lane& on, const rank_graph& what);

  const std::shared_ptr<const bound_step> what_;
  const step_place where_;
};

} // namespace troupe::detail
