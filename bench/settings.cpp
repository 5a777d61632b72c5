#include "settings.hpp"

#include <algorithm>

namespace bench {

void common_settings::add_to(CLI::App& app) {
  app.add_option("--backend", backend, "auto, cuda or host")
      ->check(CLI::IsMember({"auto", "cuda", "host"}))
      ->capture_default_str();
  app.add_option("--time-limit", time_limit_s,
                 "in seconds: a benchmark that is not done then is taken for hung")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--json", json_file, "file to write the results to");
  app.add_flag("--check", check, "fail unless every bar is met");
  app.allow_extras();
}

void common_settings::add_devices_to(CLI::App& app) {
  app.add_option("--devices", devices, "ordinals, such as 0,1; all by default")->delimiter(',');
}

bool common_settings::pass(const std::vector<bar>& bars) const {
  return !check || std::all_of(bars.begin(), bars.end(), [](const bar& x) { return x.met(); });
}

} // namespace bench
