/// One run of a step as graphs.
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
  static caf::expected<std::shared_ptr<step_operation>>
  make(std::shared_ptr<const bound_step> what, step_place where, std::uint64_t membership);

  step_operation(std::shared_ptr<const bound_step> what, step_place where,
                 std::vector<rank_call> calls, std::uint64_t membership);
  caf::expected<issue_outcome> issue(part& p, lane& on) override;
  caf::error mark_end(part& p, event_view event, stream_view stream,
                      backend_device& device) override;
  void on_lost_part(part& p, const caf::error& why) noexcept override;
  /// Does nothing while ranks get from one collective to the next.
  bool on_stall() noexcept override;
  std::shared_ptr<void> used_by_streams() const noexcept override { return progress_; }

protected:
  void describe_to(flight_entry& x, const part& p) const noexcept override;

private:
  /// The work that a rank has enqueued one by one.
  struct enqueued {
    operation_batch made;
    bool has_collectives = false; ///< other ranks may be in them
  };

  caf::error enqueue(part& p, lane& on, enqueued& to);
  caf::expected<issue_outcome> run_singly(part& p, lane& on, rank_graph& mine);
  bool is_of_loss(const caf::error& why) const noexcept;
  static caf::error enqueue_request(part& p, lane& on, operation& op);
  caf::error record(part& p, lane& on, rank_graph& to);
  caf::error replay(part& p, lane& on, rank_graph& what);
  static void take_word(lane& on, rank_graph& to);
  std::uint32_t reached(const part& p) const noexcept;

  const std::shared_ptr<const bound_step> what_;
  const step_place where_;
  /// How far a part has come.
  struct progress {
    std::shared_ptr<std::int32_t> owner; ///< of the word
    /// The place of the last collective that is over; 0: none. Of an earlier launch of the graph,
    /// until the stream clears it. Null: it is not known.
    std::atomic<std::uint32_t*> word{nullptr};
  };
  const std::shared_ptr<std::vector<progress>> progress_; ///< by part
  std::vector<std::uint32_t> reached_before_;             ///< when it was last asked for a stall
};

} // namespace troupe::detail
