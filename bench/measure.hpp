/// Lets contestants run beside one another, and checks their results first.
#pragma once

#include "contestant.hpp"
#include "watchdog.hpp"

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

namespace bench {

/// What one contestant did in one cell.
struct series {
  std::string name;
  std::vector<double> rounds; ///< median of each round; of a window, time per operation @units us
  std::vector<double> each;   ///< of every operation of all rounds; window 1 only @units us
  std::vector<double> ratios; ///< of each round, to the reference just before and just after
};

/// One size and window, and who took part: the reference, if there is one, comes first.
struct cell {
  std::string what; ///< where there are several kinds of operations
  std::size_t size_bytes = 0;
  std::size_t window = 1;
  std::vector<contestant*> contestants;
  bool has_reference = false;

  std::size_t operations = 0; ///< of a segment
  std::vector<series> results;

  std::string label() const;
};

struct effort {
  std::size_t rounds = 0;
  std::chrono::microseconds segment{0}; ///< how long a contestant runs at a time, about
};

/// Fills in the results of `cells`. A round goes through all of them, so that a machine that drifts
/// does so under all contestants; the reference runs before and after each of the others.
void measure(std::vector<cell>& cells, const effort& how_much, watchdog& guard);

/// CPU time that the process uses while it only waits. @units percent of a core
double idle_percent(std::chrono::milliseconds time);

} // namespace bench
