/// A program in a worker that lends its memory and claims its parent's memory, by orders.
#pragma once

#include "worker/program_fixture.hpp"
#include <troupe/device.hpp>
#include <troupe/launch.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace troupe::testing {

/// Elements of a keeper's memory, and of memory that the tests lend it.
inline constexpr std::size_t kept_elements = 1000;

/// An order to the program, for its own memory or for memory of its parent.
struct keeper_order {
  enum class verb : std::uint8_t { offer, claim, fill, sum, fail, drop, reset, shut_down };
  verb what = verb::offer;
  bool mine = true; ///< false: the memory that it has claimed
  float value = 0;
  std::int64_t grace_ns = std::chrono::nanoseconds{10s}.count();
  access_mode mode = access_mode::read;
  gpu_token token;
};

/// The program's report after an order.
struct keeper_outcome {
  errc code{}; ///< none: success
  gpu_token token;
  float value = 0;
};

/// Returns the program. It is registered in every worker of a binary that links it.
world_program memory_keeper();

/// Returns the elements' value if all are equal, else NaN.
caf::expected<float> value_of(const device& d, const gpu_ref<float>& ref);
/// Runs a launch that fails and leaves `target` indeterminate.
caf::error fail_to_write(const device& d, const any_gpu_ref& target);

} // namespace troupe::testing
