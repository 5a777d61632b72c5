#include "report.hpp"

#include "statistics.hpp"

#include <algorithm>
#include <cstdio>
#include <fstream>

namespace bench {

namespace {

constexpr std::size_t large = std::size_t{64} << 20;

/// @units GB/s
double algbw(const cell& x, double us) { return static_cast<double>(x.size_bytes) / us / 1e3; }

double busbw(const cell& x, double us, std::size_t ranks) {
  const auto n = static_cast<double>(ranks);
  return algbw(x, us) * 2 * (n - 1) / n;
}

/// Returns the median ratio of `name` in the cell of that size and window.
std::optional<double> ratio_of(const outcome& o, std::size_t size_bytes, std::size_t window,
                               const std::string& name) {
  for (auto& x : o.cells)
    if (x.size_bytes == size_bytes && x.window == window)
      for (auto& s : x.results)
        if (s.name == name && !s.ratios.empty())
          return median(s.ratios);
  return std::nullopt;
}

/// Returns the worst ratio of bus bandwidths for large sizes.
std::optional<double> large_busbw(const outcome& o) {
  std::optional<double> result;
  for (auto& x : o.cells)
    if (x.size_bytes >= large && x.window == 1)
      if (const auto times = ratio_of(o, x.size_bytes, 1, "troupe, facade"))
        result = std::min(result.value_or(1 / *times), 1 / *times);
  return result;
}

} // namespace

std::vector<bar> bars_of(const outcome& o) {
  return {
      {"8 B, facade, time to raw by a thread per rank", 1.4, true,
       ratio_of(o, 8, 1, "troupe, facade")},
      {"8 B, message from an actor, time to the same", 1.5, true,
       ratio_of(o, 8, 1, "troupe, message")},
      {"8 B, rank-local, a thread per rank, time to the same", 1.3, true,
       ratio_of(o, 8, 1, "troupe, rank-local")},
      {"4 KiB, 256 in flight, facade, time to the same", 1.3, true,
       ratio_of(o, 4096, 256, "troupe, facade")},
      {"64 MiB and more, facade, bus bandwidth to the same", 0.97, false, large_busbw(o)},
      {"open world that does nothing, percent of a core", 1, true, o.idle_percent},
  };
}

void print_table(const outcome& o) {
  for (const bool pipelined : {false, true}) {
    std::printf("\n%s\n%12s %6s  %-26s %11s %11s %10s %10s %7s\n",
                pipelined ? "pipelined: time per operation" : "blocking: one after the other",
                "bytes", "window", "", "median us", "p99 us", "algbw GB/s", "busbw GB/s", "ratio");
    for (auto& x : o.cells) {
      if ((x.window > 1) != pipelined)
        continue;
      for (auto& s : x.results) {
        const auto us = median(s.rounds);
        std::printf("%12zu %6zu  %-26s %11.2f ", x.size_bytes, x.window, s.name.c_str(), us);
        if (s.each.empty())
          std::printf("%11s ", "");
        else
          std::printf("%11.2f ", quantile(s.each, 0.99));
        std::printf("%10.3f %10.3f ", algbw(x, us), busbw(x, us, o.ranks));
        if (s.ratios.empty())
          std::printf("%7s\n", "");
        else
          std::printf("%7.3f\n", median(s.ratios));
      }
    }
  }
}

void print_bars(const std::vector<bar>& bars) {
  std::printf("\n");
  for (auto& x : bars) {
    const auto* limit = x.at_most ? "at most" : "at least";
    if (x.value)
      std::printf("%-10s %-54s %8.3f (%s %.2f)\n", x.met() ? "met" : "MISSED", x.text.c_str(),
                  *x.value, limit, x.limit);
    else
      std::printf("%-10s %-54s %8s (%s %.2f)\n", "unmeasured", x.text.c_str(), "", limit, x.limit);
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

void write_json(const std::string& file, const nlohmann::ordered_json& x) {
  if (file.empty())
    return;
  std::ofstream out{file};
  out << x.dump(2) << '\n';
  if (!out.flush())
    fail("cannot write " + file);
}

nlohmann::ordered_json to_json(const outcome& o, const std::vector<bar>& bars) {
  nlohmann::ordered_json result;
  result["machine"] = o.machine;
  result["ranks"] = o.ranks;
  result["idle_percent_of_a_core"] = o.idle_percent;
  for (auto& x : o.cells)
    for (auto& s : x.results) {
      const auto us = median(s.rounds);
      nlohmann::ordered_json row{{"size_bytes", x.size_bytes},
                                 {"window", x.window},
                                 {"mode", s.name},
                                 {"operations_per_round", x.operations},
                                 {"median_us", us},
                                 {"algbw_gb_s", algbw(x, us)},
                                 {"busbw_gb_s", busbw(x, us, o.ranks)}};
      if (!s.each.empty())
        row["p99_us"] = quantile(s.each, 0.99);
      if (!s.ratios.empty())
        row["ratio"] = median(s.ratios);
      row["round_medians_us"] = s.rounds;
      row["round_ratios"] = s.ratios;
      result["all_reduce"].push_back(std::move(row));
    }
  result["bars"] = to_json(bars);
  return result;
}

} // namespace bench
