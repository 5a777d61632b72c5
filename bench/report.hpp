/// The report of a benchmark: a table, the project's limits, and JSON.
#pragma once

#include "measure.hpp"

#include <nlohmann/json.hpp>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace bench {

struct outcome {
  nlohmann::ordered_json machine; ///< also the settings of the run
  std::size_t ranks = 0;
  std::vector<cell> cells;
  double idle_percent = 0;
};

/// A limit that the project wants to meet.
struct bar {
  std::string text;
  double limit = 0;
  bool at_most = true;
  std::optional<double> value; ///< none: not measured

  bool met() const { return value && (at_most ? *value <= limit : *value >= limit); }
};

std::vector<bar> bars_of(const outcome& x);

void print_table(const outcome& x);
void print_bars(const std::vector<bar>& bars);
nlohmann::ordered_json to_json(const std::vector<bar>& bars);
nlohmann::ordered_json to_json(const outcome& x, const std::vector<bar>& bars);
/// Writes the file, or ends the process. Does nothing if `file` is empty.
void write_json(const std::string& file, const nlohmann::ordered_json& x);

} // namespace bench
