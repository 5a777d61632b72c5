/// One run of a step as one operation.
#pragma once

#include "collective/collective_operation.hpp"
#include "step/bound_step.hpp"

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

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
  caf::error mark_end(part& p, event_view event, stream_view stream,
                      backend_device& device) override;
  /// Not as long as its ranks get from one request to the next.
  bool on_stall() noexcept override;

protected:
  void describe_to(flight_entry& x, const part& p) const noexcept override;

private:
  enum class mode { runs, records };

  caf::error enqueue(part& p, lane& on, mode how);
  static caf::error enqueue_request(part& p, lane& on, operation& op);
  caf::error record(part& p, lane& on, rank_graph& to);
  caf::error replay(part& p, lane& on, rank_graph& what);

  /// Asks how far the part has come. Returns whether that is news.
  bool look(const part& p) const noexcept;

  const std::shared_ptr<const bound_step> what_;
  const step_place where_;
  /// By part: the last request that is known to be over, from 1; 0: none.
  mutable std::vector<std::atomic<std::uint32_t>> reached_;
};

} // namespace troupe::detail
