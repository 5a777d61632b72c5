/// Random choices for tests.
#pragma once

#include <cstddef>
#include <random>

namespace troupe::testing {

/// Returns a number from `low` to `high`, both included.
inline std::size_t pick(std::mt19937_64& random, std::size_t low, std::size_t high) {
  return std::uniform_int_distribution<std::size_t>{low, high}(random);
}

inline bool chance(std::mt19937_64& random, double probability) {
  return std::uniform_real_distribution<>{}(random) < probability;
}

} // namespace troupe::testing
