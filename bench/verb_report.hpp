/// The report of the comparison of verbs: a table, the project's limits, and JSON.
#pragma once

#include "measure.hpp"
#include "report.hpp"

#include <nlohmann/json.hpp>

#include <cstddef>
#include <vector>

namespace bench {

struct outcome {
  nlohmann::ordered_json machine; ///< also the settings of the run
  std::size_t ranks = 0;
  std::vector<cell> cells; ///< `what` is the name of the verb
  double idle_percent = 0;
};

std::vector<bar> bars_of(const outcome& x);

void print_table(const outcome& x);
nlohmann::ordered_json to_json(const outcome& x, const std::vector<bar>& bars);

} // namespace bench
