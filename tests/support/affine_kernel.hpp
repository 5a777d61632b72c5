/// A user kernel for tests.
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace troupe::testing {

/// Launches x[i] = a * x[i] + y[i], with wrap-around. Returns a cudaError_t.
/// @shape x, y: `count` elements in device memory
int launch_affine(std::uint32_t* x, const std::uint32_t* y, std::uint32_t a, std::size_t count,
                  CUstream_st* stream) noexcept;

} // namespace troupe::testing
