/// What the benchmark compares.
#pragma once

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace bench {

/// @units microseconds
struct timing {
  double per_operation = 0; ///< the time of all, divided by their number
  std::vector<double> each; ///< of each operation; only where they run one by one
};

/// One way to do what a benchmark measures.
class contestant {
public:
  virtual ~contestant() = default;

  virtual std::string name() const = 0;

  /// Runs as it is going to be timed, and ends the process if a result is wrong.
  virtual void verify(std::size_t size_bytes, std::size_t window) = 0;

  /// Operations of `size_bytes`, never more than `window` of them unfinished. Returns when the last
  /// one is done.
  virtual timing run(std::size_t size_bytes, std::size_t operations, std::size_t window) = 0;
};

/// Ends the process: with a rank that failed, its peers stand still inside NCCL for good.
[[noreturn]] inline void fail(const std::string& why) {
  std::fflush(stdout);
  std::fprintf(stderr, "bench: %s\n", why.c_str());
  std::_Exit(1);
}

} // namespace bench
