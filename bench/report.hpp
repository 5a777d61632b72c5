/// The parts of a report that benchmarks share: the project's limits, and JSON.
#pragma once

#include <nlohmann/json.hpp>

#include <optional>
#include <string>
#include <vector>

namespace bench {

/// A limit that the project wants to meet.
struct bar {
  std::string text;
  double limit = 0;
  bool at_most = true;
  std::optional<double> value; ///< none: not measured

  bool met() const { return value && (at_most ? *value <= limit : *value >= limit); }
};

void print_bars(const std::vector<bar>& bars);
nlohmann::ordered_json to_json(const std::vector<bar>& bars);
/// Writes the file, whole or not at all, or ends the process.
void write_file(const std::string& file, const std::string& text);
/// Writes the file like `write_file`. Does nothing if `file` is empty.
void write_json(const std::string& file, const nlohmann::ordered_json& x);

} // namespace bench
