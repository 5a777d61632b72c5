/// The requests of a step over handles, in their order.
#pragma once

#include "device/device_core.hpp"
#include "foundation/rank_set.hpp"
#include "operation/operation.hpp"
#include "world/world_core.hpp"
#include <troupe/collective.hpp>
#include <troupe/error.hpp>
#include <troupe/gpu_ref.hpp>
#include <troupe/recording.hpp>
#include <troupe/scalar.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace troupe::detail {

/// The handles of a step by name, one for each rank.
using step_buffers = std::map<std::string, std::vector<any_gpu_ref>, std::less<>>;

// Requests to devices. The i-th element of each list is for the i-th rank of the request.

struct step_fill {
  std::vector<any_gpu_ref> targets;
  scalar element;
};

struct step_copy {
  std::vector<any_gpu_ref> targets;
  std::vector<any_gpu_ref> sources;
};

struct step_launch {
  std::string name;
  std::vector<std::uint8_t> arguments;
  std::vector<std::vector<any_gpu_ref>> reads;
  std::vector<std::vector<any_gpu_ref>> writes;
};

/// A recorded request with handles in place of names.
struct step_request {
  const char* verb = "";
  std::vector<std::size_t> ranks = {}; ///< of a request to devices
  std::variant<step_fill, step_copy, step_launch, collective, group> what = {};

  bool is_collective() const noexcept {
    return std::holds_alternative<collective>(what) || std::holds_alternative<group>(what);
  }
};

/// Where a step runs.
struct step_place {
  std::shared_ptr<world_core> world;
  std::vector<device_core> devices; ///< by rank
};

/// The operations of one run.
struct step_operations {
  operation_batch all;
  /// By operation: the index of its request. Empty: one operation is the whole step.
  std::vector<std::size_t> request_of;

  /// Returns `why`, an error of the `i`th operation, with the request that failed.
  caf::error in_step(std::size_t i, const caf::error& why) const;
};

/// Returns `why` with the place of the request in its step before the text. `index`: from 0.
caf::error in_step(std::size_t index, std::string_view verb, const caf::error& why);

/// The requests of a step: each with the handles that it reads and writes. Does not change.
class step_requests {
public:
  /// @errors errc::invalid_argument: an unknown name, a rank that is out of range, or a group of
  ///         other requests than collectives; errc::out_of_range: a part that is not in its buffer
  static caf::expected<step_requests> bind(std::span<const recorded_request> recorded,
                                           const step_buffers& buffers, std::size_t ranks);

  std::size_t size() const noexcept { return requests_.size(); }
  const step_request& operator[](std::size_t index) const noexcept { return requests_[index]; }
  bool have_collectives() const noexcept {
    return std::ranges::any_of(requests_, &step_request::is_collective);
  }

  /// Makes the operations of one run, in order, without requests to the devices of `absent`.
  /// @errors why one of the requests is refused
  caf::expected<step_operations> make(const step_place& where, rank_set absent,
                                      const request_options& options) const;
  /// Adds what the requests would write.
  void add_writes(std::vector<use>& to, std::size_t ranks) const;

private:
  std::vector<step_request> requests_;
};

} // namespace troupe::detail
