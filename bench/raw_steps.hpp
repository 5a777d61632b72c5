/// The step of the benchmark by hand: a CUDA graph with NCCL, in a process for each GPU.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>

namespace bench {

/// The work of a step: `sums` times, `kernels` kernels that add 1 to a buffer of each rank, and its
/// average over the ranks.
struct step_shape {
  std::size_t sums = 8;
  std::size_t kernels = 8; ///< before each sum
  std::size_t elements = 0;
};

/// Processes that run the step. No CUDA may have been called before they start.
class raw_steps {
public:
  virtual ~raw_steps() = default;
  /// Runs the step `count` times, at most `window` at a time, and checks the values. Returns how
  /// long it took.
  virtual std::chrono::nanoseconds run(std::size_t count, std::size_t window) = 0;
};

std::unique_ptr<raw_steps> start_raw_steps(std::size_t ranks, const step_shape& shape);

} // namespace bench
