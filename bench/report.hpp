/// What the benchmark tells: a table, the project's bars, and JSON.
#pragma once

#include "measure.hpp"

#include <nlohmann/json.hpp>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace bench {

struct outcome {
  nlohmann::ordered_json machine; ///< and how it was run
  std::size_t ranks = 0;
  std::vector<cell> cells;
  double idle_percent = 0;
};

/// A number that the project wants to keep.
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
/// Ends the process if it cannot; does nothing without a file.
void write_json(const std::string& file, const nlohmann::ordered_json& x);

} // namespace bench
