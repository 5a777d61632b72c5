/// All-reduces as contestants.
#pragma once

#include "contestant.hpp"

#include <cstddef>
#include <span>

namespace bench {

/// One way to sum float32 numbers over all ranks, in place.
class summing_contestant : public contestant {
public:
  virtual std::size_t ranks() const = 0;

  /// Copies host memory to the buffer of `rank`, from element `first` on (`write`), or back
  /// (`read`). Blocks.
  /// @thread any; one per rank at the same time
  virtual void write(std::size_t rank, std::size_t first, std::span<const float> numbers) = 0;
  virtual void read(std::size_t rank, std::size_t first, std::span<float> numbers) = 0;
  /// Sets the first `count` elements of every rank to 0.
  virtual void clear(std::size_t count) = 0;

  /// Runs all-reduces of the first `count` elements, as `run` does. Returns when every rank is done
  /// with the last one.
  virtual timing sum(std::size_t count, std::size_t operations, std::size_t window) = 0;

  /// Compares every element of every rank.
  void verify(std::size_t size_bytes, std::size_t window) final;
  timing run(std::size_t size_bytes, std::size_t operations, std::size_t window) final {
    return sum(size_bytes / sizeof(float), operations, window);
  }
};

} // namespace bench
