/// The ways that a benchmark compares.
#pragma once

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace bench {

/// @units microseconds
struct timing {
  double per_operation = 0; ///< total time divided by the number of operations
  std::vector<double> each; ///< time of each operation; only if they run one at a time
};

/// One way to do the work that a benchmark measures.
class contestant {
public:
  virtual ~contestant() = default;

  virtual std::string name() const = 0;

  /// Runs in the same way as for timing. Ends the process if a result is wrong.
  virtual void verify(std::size_t size_bytes, std::size_t window) = 0;

  /// Runs operations of `size_bytes`, at most `window` at the same time. Returns when the last one
  /// is done.
  virtual timing run(std::size_t size_bytes, std::size_t operations, std::size_t window) = 0;
};

/// Ends the process: if one rank fails, its peers hang inside NCCL for good.
[[noreturn]] inline void fail(const std::string& why) {
  std::fflush(stdout);
  std::fprintf(stderr, "bench: %s\n", why.c_str());
  std::_Exit(1);
}

} // namespace bench
