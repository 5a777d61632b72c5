/// Runs contestants in turns, after a check of their results.
#pragma once

#include "contestant.hpp"
#include "watchdog.hpp"

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

namespace bench {

/// Results of one contestant in one cell.
struct series {
  std::string name;
  std::vector<double> rounds; ///< median of each round; for a window, time per operation @units us
  std::vector<double> each;   ///< each operation of all rounds; window 1 only @units us
  std::vector<double> ratios; ///< of each round, to the reference just before and after
};

/// One size and window, with its contestants. The reference, if any, is the first.
struct cell {
  std::string what; ///< kind of operation, if there are several
  std::size_t size_bytes = 0;
  std::size_t window = 1;
  std::vector<contestant*> contestants;
  bool has_reference = false;

  std::size_t operations = 0; ///< in a segment
  std::vector<series> results;

  std::string label() const;
};

struct effort {
  std::size_t rounds = 0;
  std::chrono::microseconds segment{0}; ///< approximate time of one contestant's turn
};

/// Fills in the results of `cells`. A round visits all cells, so that drift of the machine affects
/// all contestants. The reference runs before and after each of the others.
void measure(std::vector<cell>& cells, const effort& how_much, watchdog& guard);

/// Returns the CPU time that the process uses while it only waits. @units percent of a core
double idle_percent(std::chrono::milliseconds time);

} // namespace bench
