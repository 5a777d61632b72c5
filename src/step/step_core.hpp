/// A step: recorded requests, their buffers, and the world that they run in.
#pragma once

#include "step/bound_step.hpp"
#include "step/step_requests.hpp"
#include "world/world_core.hpp"
#include <troupe/collective.hpp>
#include <troupe/step.hpp>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace troupe::detail {

class step_run;

/// @thread any
class step_core {
public:
  using answer = std::shared_ptr<operation_of<step_done>>;

  /// @errors as `world::record`
  static caf::expected<std::shared_ptr<step_core>> make(std::shared_ptr<world_core> of,
                                                        std::vector<recorded_request> recorded,
                                                        std::vector<named_buffers> buffers);

  answer run(const request_options& options) const;
  /// @errors as `step::rebind`
  caf::error rebind(const std::string& name, std::vector<any_gpu_ref> refs);

  /// Adds what a run would write.
  void add_writes(std::vector<use>& to) const;
  std::size_t size() const noexcept { return recorded_.size(); }
  std::string runs_as() const;
  bool is_of(const world_core& x) const noexcept { return place_.world.get() == &x; }

private:
  using shared_step = std::shared_ptr<const bound_step>;

  step_core(step_place where, std::vector<recorded_request> recorded, step_buffers buffers)
      : place_(std::move(where)), recorded_(std::move(recorded)), buffers_(std::move(buffers)) {}

  shared_step bound() const {
    std::lock_guard lock{mutex_};
    return bound_;
  }
  /// Returns the checked requests over `buffers`.
  caf::expected<shared_step> bind(const step_buffers& buffers) const;
  static caf::error check_number(const char* verb, const std::string& name, std::size_t number,
                                 std::size_t ranks);
  caf::expected<step_operations> start(const shared_step& bound, step_run& run,
                                       const request_options& options) const;
  caf::expected<step_operations> make(const shared_step& bound, rank_set absent,
                                      const request_options& options) const;

  const step_place place_;
  const std::vector<recorded_request> recorded_;
  mutable std::mutex mutex_; // of the next two
  step_buffers buffers_;
  shared_step bound_;
};

} // namespace troupe::detail
