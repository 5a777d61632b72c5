#include "verb_report.hpp"

#include "statistics.hpp"
#include "verb_contestant.hpp"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>

namespace bench {

namespace {

constexpr std::size_t large = std::size_t{64} << 20;

/// @units GB/s
double algbw(const cell& x, double us) { return static_cast<double>(x.size_bytes) / us / 1e3; }

double busbw(const cell& x, double us, std::size_t ranks) {
  return algbw(x, us) * find_verb(x.what)->bus_factor(ranks);
}

/// Returns the median ratio of troupe with NCCL, for all-reduces of that size and window.
std::optional<double> ratio_of(const outcome& o, std::size_t size_bytes, std::size_t window,
                               std::string_view mode) {
  for (auto& x : o.cells)
    if (x.what == "all_reduce" && x.size_bytes == size_bytes && x.window == window)
      for (auto& s : x.results)
        if (auto& label = label_of(s.name);
            label.way == "nccl" && label.mode == mode && !s.ratios.empty())
          return median(s.ratios);
  return std::nullopt;
}

/// Returns the worst ratio of bus bandwidths for large sizes.
std::optional<double> large_busbw(const outcome& o) {
  std::optional<double> result;
  for (auto& x : o.cells)
    if (x.size_bytes >= large && x.window == 1)
      if (const auto times = ratio_of(o, x.size_bytes, 1, "facade"))
        result = std::min(result.value_or(1 / *times), 1 / *times);
  return result;
}

void print_rows(const outcome& o, std::string_view verb, bool pipelined) {
  bool first = true;
  for (auto& x : o.cells) {
    if (x.what != verb || (x.window > 1) != pipelined)
      continue;
    if (first)
      std::printf("\n%s, %s\n%12s %6s  %-26s %11s %11s %10s %10s %7s\n", x.what.c_str(),
                  pipelined ? "pipelined: time per operation" : "blocking: one after the other",
                  "bytes", "window", "", "median us", "p99 us", "algbw GB/s", "busbw GB/s",
                  "ratio");
    first = false;
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

} // namespace

std::vector<bar> bars_of(const outcome& o) {
  return {
      {"8 B, facade, time to raw by a thread per rank", 1.4, true, ratio_of(o, 8, 1, "facade")},
      {"8 B, message from an actor, time to the same", 1.5, true, ratio_of(o, 8, 1, "message")},
      {"8 B, rank-local, a thread per rank, time to the same", 1.3, true,
       ratio_of(o, 8, 1, "rank_local")},
      {"4 KiB, 256 in flight, facade, time to the same", 1.3, true,
       ratio_of(o, 4096, 256, "facade")},
      {"64 MiB and more, facade, bus bandwidth to the same", 0.97, false, large_busbw(o)},
      {"open world that does nothing, percent of a core", 1, true, o.idle_percent},
  };
}

void print_table(const outcome& o) {
  for (auto& x : all_verbs())
    for (const bool pipelined : {false, true})
      print_rows(o, x.name, pipelined);
}

nlohmann::ordered_json to_json(const outcome& o, const std::vector<bar>& bars) {
  nlohmann::ordered_json result;
  result["machine"] = o.machine;
  result["ranks"] = o.ranks;
  result["idle_percent_of_a_core"] = o.idle_percent;
  result["bytes_are"] = "of one rank's block";
  result["rows"] = nlohmann::ordered_json::array();
  for (auto& x : o.cells)
    for (auto& s : x.results) {
      const auto us = median(s.rounds);
      const auto& label = label_of(s.name);
      nlohmann::ordered_json row{
          {"verb", x.what},   {"bytes", x.size_bytes},      {"in_flight", x.window},
          {"way", label.way}, {"mode", label.mode},         {"operations_per_round", x.operations},
          {"median_us", us},  {"algbw_gb_s", algbw(x, us)}, {"busbw_gb_s", busbw(x, us, o.ranks)}};
      if (!s.each.empty())
        row["p99_us"] = quantile(s.each, 0.99);
      if (!s.ratios.empty())
        row["ratio"] = median(s.ratios);
      row["round_medians_us"] = s.rounds;
      row["round_ratios"] = s.ratios;
      result["rows"].push_back(std::move(row));
    }
  result["bars"] = to_json(bars);
  return result;
}

} // namespace bench
