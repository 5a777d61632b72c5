/// A program in a worker that lends its memory and borrows its parent's, as it is told.
#pragma once

#include "worker/program_fixture.hpp"
#include <troupe/device.hpp>
#include <troupe/launch.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace troupe::testing {

/// Of a keeper's memory, and of what the tests lend it.
inline constexpr std::size_t kept_elements = 1000;

/// What the program is to do with its own memory, or with memory of its parent's.
struct keeper_order {
  enum class verb : std::uint8_t { offer, claim, fill, sum, fail, drop, reset, shut_down };
  verb what = verb::offer;
  bool mine = true; ///< else: what it has claimed
  float value = 0;
  std::int64_t grace_ns = std::chrono::nanoseconds{10s}.count();
  access_mode mode = access_mode::read;
  gpu_token token;
};

/// And what came of it: its report.
struct keeper_outcome {
  errc code{}; ///< none: it went well
  gpu_token token;
  float value = 0;
};

/// Registered in every worker of a binary that has it.
world_program memory_keeper();

/// The elements' value, if it is the same for all; else no number.
caf::expected<float> value_of(const device& d, const gpu_ref<float>& ref);
/// Leaves what it was to write half-written.
caf::error fail_to_write(const device& d, const any_gpu_ref& target);

} // namespace troupe::testing
