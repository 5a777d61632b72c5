/// The options that all benchmarks have.
#pragma once

#include "report.hpp"

#include <CLI/CLI.hpp>

#include <cstddef>
#include <string>
#include <vector>

namespace bench {

struct common_settings {
  std::string backend = "auto";
  std::vector<int> devices;     ///< ordinals; empty: all
  std::size_t time_limit_s = 0; ///< 0: the benchmark's own
  std::string json_file;
  bool check = false;

  /// Adds --backend, --time-limit, --json and --check. Options that the benchmark does not know are
  /// the library's.
  void add_to(CLI::App& app);
  /// Adds --devices.
  void add_devices_to(CLI::App& app);

  /// Returns true if no bar is missed, or the bars are not to be checked.
  bool pass(const std::vector<bar>& bars) const;
};

} // namespace bench
