#include "report.hpp"

#include "contestant.hpp"
#include "foundation/system_call.hpp"
#include "foundation/write_file.hpp"

#include <cstdio>

namespace bench {

void print_bars(const std::vector<bar>& bars) {
  std::printf("\n");
  for (auto& x : bars) {
    const auto* limit = x.at_most ? "at most" : "at least";
    if (x.value)
      std::printf("%-10s %-54s %8.3f (%s %.3f)\n", x.met() ? "met" : "MISSED", x.text.c_str(),
                  *x.value, limit, x.limit);
    else
      std::printf("%-10s %-54s %8s (%s %.3f)\n", "unmeasured", x.text.c_str(), "", limit, x.limit);
  }
}

nlohmann::ordered_json to_json(const std::vector<bar>& bars) {
  auto result = nlohmann::ordered_json::array();
  for (auto& x : bars) {
    nlohmann::ordered_json row{{"bar", x.text}, {x.at_most ? "at_most" : "at_least", x.limit}};
    row["value"] = x.value ? nlohmann::ordered_json(*x.value) : nlohmann::ordered_json();
    row["met"] = x.met();
    result.push_back(std::move(row));
  }
  return result;
}

void write_file(const std::string& file, const std::string& text) {
  const troupe::detail::no_file_size_signal guard;
  if (const auto why = troupe::detail::replace_file(file, text))
    fail("cannot write " + file + ": " + to_string(*why));
}

void write_json(const std::string& file, const nlohmann::ordered_json& x) {
  if (!file.empty())
    write_file(file, x.dump(2) + '\n');
}

} // namespace bench
