/// Recorded requests that run together, any number of times.
#pragma once

#include <troupe/collective.hpp>
#include <troupe/error.hpp>
#include <troupe/gpu_ref.hpp>
#include <troupe/pending.hpp>
#include <troupe/recording.hpp>
#include <troupe/world.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace troupe {

namespace detail {
class step_core;
struct step_access;
} // namespace detail

/// The result of a run of a step.
struct step_done {
  std::uint64_t operation = 0; ///< the run's number (`pending::number`)
  /// The present ranks, if some were absent (`request_options::allow_shrunk`); empty: all.
  std::vector<std::int32_t> ranks = {};
};

template <class Inspector> detail::inspect_result<Inspector> inspect(Inspector& f, step_done& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::step_done", field("operation", x.operation),
                        field("ranks", x.ranks));
}

/// Requests of a world (`world::record`) that run as one: one place in the order of all requests,
/// one deadline, one answer. The requests are kept, so a step still runs after a loss, a reset of
/// another device, or a change of the membership. Copies refer to the same step. It keeps its world
/// alive. An empty object, made by the default constructor or moved from, refuses every request
/// (errc::invalid_argument).
/// @thread any, several at once; a copy must not be assigned to while another thread uses that copy
class step {
public:
  /// Makes an empty object.
  step() noexcept = default;

  /// Runs all requests once, in their order, as far as they depend on each other. No request of
  /// another caller comes in between. Completes when all of them have. If one fails, so do those
  /// that need what it would have written; the others run, and are awaited. Cancelling cancels the
  /// requests that have not begun, the last one first. `options` hold for each request. A step that
  /// runs as a graph (`runs_as`) fails, and is cancelled, as a whole.
  /// @errors the error of the first request, in the recorded order, that failed. Its text begins
  ///         with "request k of the step", where the first one is request 1. If one is refused,
  ///         none runs. errc::not_supported: `max_retries` is not 0
  pending<step_done> run(request_options options = {}) const;

  /// Puts other handles in place of those that were named `name`, for later runs.
  /// @shape  refs: one per rank, on its device, with the type and count of the former one
  /// @errors errc::invalid_argument: no buffers of this name, or not one handle per rank;
  ///         errc::shape_mismatch; those of `world::record`. After an error the step is unchanged
  template <ref_range Refs> caf::error rebind(const std::string& name, const Refs& refs) const {
    return rebind_any(name, any(refs));
  }

  /// Returns the number of recorded requests.
  std::size_t size() const noexcept;

  /// Returns in which form the step runs, and why if it is no graph: "as a graph on each device",
  /// or "as its requests: the devices are virtual".
  std::string runs_as() const;

private:
  friend class world;
  friend struct detail::step_access;
  step(world of, std::shared_ptr<detail::step_core> core)
      : world_(std::move(of)), core_(std::move(core)) {}
  caf::error rebind_any(const std::string& name, std::vector<any_gpu_ref> refs) const;

  world world_;
  std::shared_ptr<detail::step_core> core_;
};

/// To a world: runs a step (`step::run`); within the process only. Reply: `step_done`.
/// @errors as `world::run`
struct run_step {
  step what = {};
  request_options options = {};
};

} // namespace troupe
