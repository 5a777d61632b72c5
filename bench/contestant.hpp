/// What the benchmark compares.
#pragma once

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

namespace bench {

/// @units microseconds
struct timing {
  double per_operation = 0; ///< the time of all, divided by their number
  std::vector<double> each; ///< of each operation; only where they run one by one
};

/// One way to sum float32 numbers over all ranks, in place.
class contestant {
public:
  virtual ~contestant() = default;

  virtual std::string name() const = 0;
  virtual std::size_t ranks() const = 0;

  /// Host memory into the buffer of `rank`, from element `first` on, and back. Both block.
  /// @thread any; one for each rank at the same time
  virtual void write(std::size_t rank, std::size_t first, std::span<const float> numbers) = 0;
  virtual void read(std::size_t rank, std::size_t first, std::span<float> numbers) = 0;
  /// Zeros in the first `count` elements of every rank.
  virtual void clear(std::size_t count) = 0;

  /// All-reduces of the first `count` elements, never more than `window` of them unfinished.
  /// Returns when every rank is done with the last one.
  virtual timing run(std::size_t count, std::size_t operations, std::size_t window) = 0;
};

/// Ends the process: with a rank that failed, its peers stand still inside NCCL for good.
[[noreturn]] inline void fail(const std::string& why) {
  std::fflush(stdout);
  std::fprintf(stderr, "bench: %s\n", why.c_str());
  std::_Exit(1);
}

} // namespace bench
