/// Registered launches for tests of steps: kernels on GPUs, functions on virtual devices.
#pragma once

#include <cstdint>

namespace troupe::testing {

/// The argument and the function of `affine_launch`: y = factor * x + term, modulo 2^32.
struct affine {
  std::uint32_t factor = 1;
  std::uint32_t term = 0;

  std::uint32_t operator()(std::uint32_t x) const { return factor * x + term; }
};

/// Reads x and writes y, both `std::uint32_t`.
inline constexpr const char* affine_launch = "StepLaunches.affine";
/// Delays its stream for a time that it reads, a `std::uint32_t`, in microseconds. For GPUs alone.
inline constexpr const char* wait_launch = "StepLaunches.wait";
/// Delays its stream for a random time up to its argument, a number of microseconds.
inline constexpr const char* delay_launch = "StepLaunches.delay";

} // namespace troupe::testing
