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

/// A recorded graph, which it drops.
class recorded_graph {
public:
  recorded_graph() = default;
  recorded_graph(const std::shared_ptr<backend_device>& on, graph_view graph)
      : on_(on), graph_(graph) {}
  recorded_graph(recorded_graph&& other) noexcept
      : on_(std::exchange(other.on_, {})), graph_(std::exchange(other.graph_, {})) {}
  recorded_graph& operator=(recorded_graph&& other) noexcept {
    std::swap(on_, other.on_);
    std::swap(graph_, other.graph_);
    return *this;
  }
  ~recorded_graph();

  graph_view view() const noexcept { return graph_; }

private:
  std::weak_ptr<backend_device> on_; ///< weak: a graph ends with its device
  graph_view graph_;
};

/// The graph of one rank. @thread the lane of the rank
struct rank_graph {
  /// What the addresses in the graph depend on.
  struct origin {
    std::weak_ptr<communicator> target;
    std::uint64_t generation = 0;
    std::uint64_t workspaces = 0; ///< as `library_states::workspace_changes`
    void* stream = nullptr;

    bool operator==(const origin& x) const noexcept {
      return !target.owner_before(x.target) && !x.target.owner_before(target) &&
             generation == x.generation && workspaces == x.workspaces && stream == x.stream;
    }
  };

  origin of;
  recorded_graph graph;      ///< empty: it is not recorded
  bool runs_singly = false;  ///< it cannot be recorded
  bool was_launched = false; ///< it is the last work of its stream
};

/// A step over certain handles.
class bound_step {
public:
  /// @param why_requests why it runs as its requests; empty: it runs as one operation
  bound_step(step_requests all, std::size_t ranks, std::string why_requests,
             std::vector<use> all_uses)
      : requests(std::move(all)), uses(std::move(all_uses)), why_requests_(std::move(why_requests)),
        graphs_(ranks) {}

  bool is_one_operation() const noexcept { return why_requests_.empty(); }
  /// As `step::runs_as`.
  std::string runs_as() const;
  /// Notes why a rank's work cannot be a graph.
  void note_singly(const caf::error& why) const;
  /// @thread the lane of the rank
  rank_graph& graph_of(std::size_t rank) const noexcept { return graphs_[rank]; }

  const step_requests requests;
  const std::vector<use> uses; ///< of all requests, if it is one operation; `part` is the rank

private:
  const std::string why_requests_;
  mutable std::vector<rank_graph> graphs_;
  mutable std::mutex mutex_;
  mutable std::string why_singly_; ///< under `mutex_`
};

/// Makes `requests` ready to run.
/// @errors that of the first request which is wrong
caf::expected<std::shared_ptr<const bound_step>> bind_step(step_requests requests,
                                                           const step_place& where);

} // namespace troupe::detail
