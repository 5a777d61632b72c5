/// The requests of a step over handles, and what is made of them once.
#pragma once

#include "operation/operation.hpp"
#include "step/step_requests.hpp"
#include <troupe/backend.hpp>
#include <troupe/error.hpp>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace troupe::detail {

class communicator;
class device_state;
class lane;

/// A recorded graph, which its lane drops.
class recorded_graph {
public:
  recorded_graph() = default;
  /// `keeps`: what it was made of, since its work may have addresses of it
  recorded_graph(lane& on, graph_view graph, operation_batch keeps);
  recorded_graph(recorded_graph&& other) noexcept { *this = std::move(other); }
  recorded_graph& operator=(recorded_graph&& other) noexcept {
    std::swap(home_, other.home_);
    std::swap(on_, other.on_);
    std::swap(graph_, other.graph_);
    std::swap(keeps_, other.keeps_);
    return *this;
  }
  ~recorded_graph();

  graph_view view() const noexcept { return graph_; }

private:
  std::shared_ptr<device_state> home_;
  std::weak_ptr<backend_device> on_; ///< weak: a device that has ended may be opened anew
  graph_view graph_;
  operation_batch keeps_;
};

/// The graph of one rank. @thread the lane of the rank
struct rank_graph {
  /// All that the addresses in the graph depend on.
  struct origin {
    std::weak_ptr<communicator> target;
    std::uint64_t generation = 0;
    std::uint64_t workspaces = 0; ///< as `lane::workspace_changes`
    void* stream = nullptr;

    bool operator==(const origin& x) const noexcept {
      return !target.owner_before(x.target) && !x.target.owner_before(target) &&
             generation == x.generation && workspaces == x.workspaces && stream == x.stream;
    }
  };

  origin of;
  recorded_graph graph;                  ///< empty: it is not recorded
  std::shared_ptr<std::int32_t> reached; ///< its collectives write their places there; may be null
  bool ends_with_graph = false;          ///< the last run did
  int failures = 0;                      ///< of attempts to record it
};

/// A step over certain handles.
class bound_step {
public:
  /// @param why_no_graph why it runs as its requests; empty: it runs as graphs
  bound_step(step_requests all, std::size_t ranks, std::string why_no_graph,
             std::vector<use> all_uses)
      : requests(std::move(all)), uses(std::move(all_uses)), graphs_(ranks),
        why_no_graph_(std::move(why_no_graph)) {}

  bool is_graph() const;
  /// As `step::runs_as`.
  std::string runs_as() const;
  /// Lets later runs be requests, since a rank's work cannot be recorded.
  void give_up_graph(const caf::error& why) const;
  /// @thread the lane of the rank
  rank_graph& graph_of(std::size_t rank) const noexcept { return graphs_[rank]; }

  const step_requests requests;
  const std::vector<use> uses; ///< of all requests, if it runs as graphs; `part` is the rank

private:
  mutable std::vector<rank_graph> graphs_;
  mutable std::mutex mutex_;
  mutable std::string why_no_graph_; ///< under `mutex_`
};

/// Makes `requests` ready to run.
/// @errors that of the first request which is wrong
caf::expected<std::shared_ptr<const bound_step>> bind_step(step_requests requests,
                                                           const step_place& where);

} // namespace troupe::detail
