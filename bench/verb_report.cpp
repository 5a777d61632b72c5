#include "verb_report.hpp"

#include "statistics.hpp"
#include "verb_contestant.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace bench {

namespace {

constexpr std::size_t kib = std::size_t{1} << 10;
constexpr std::size_t mib = kib << 10;

/// @units GB/s
double algbw(const cell& x, double us) { return static_cast<double>(x.size_bytes) / us / 1e3; }

double busbw(const cell& x, double us, std::size_t ranks) {
  return algbw(x, us) * find_verb(x.what)->bus_factor(ranks);
}

/// Some of the ratios of a run, for which there is a limit.
struct selection {
  std::string_view way;
  std::string_view mode;
  std::vector<std::string_view> verbs; ///< empty: all but all_reduce and barrier
  std::size_t first_bytes = 0;
  std::size_t last_bytes = 0;
  std::size_t window = 1;

  bool has(const cell& x) const {
    const bool of_verb = verbs.empty() ? x.what != "all_reduce" && x.size_bytes > 0
                                       : std::ranges::find(verbs, x.what) != verbs.end();
    return of_verb && x.window == window && x.size_bytes >= first_bytes &&
           x.size_bytes <= last_bytes;
  }
};

/// Returns the largest of the median ratios to NCCL by hand.
std::optional<double> worst_ratio(const outcome& o, const selection& of) {
  std::optional<double> result;
  for (auto& x : o.cells)
    if (of.has(x))
      for (auto& s : x.results)
        if (auto& label = label_of(s.name);
            label.way == of.way && label.mode == of.mode && !s.ratios.empty())
          result = std::max(result.value_or(0), median(s.ratios));
  return result;
}

/// Returns the smallest of the ratios of bandwidths.
std::optional<double> worst_bandwidth(const outcome& o, const selection& of) {
  const auto times = worst_ratio(o, of);
  return times ? std::optional{1 / *times} : std::nullopt;
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
  const auto sum = [](std::string_view way, std::string_view mode, std::size_t first,
                      std::size_t last, std::size_t window = 1) {
    return selection{way, mode, {"all_reduce"}, first, last, window};
  };
  const auto at_most = [&](const char* what, double limit, const selection& of) {
    return bar{what, limit, true, worst_ratio(o, of)};
  };
  const auto at_least = [&](const char* what, double limit, const selection& of) {
    return bar{what, limit, false, worst_bandwidth(o, of)};
  };
  return {
      at_most("nccl: 8 B, facade, time to raw by a thread per rank", 1.4,
              sum("nccl", "facade", 8, 8)),
      at_most("nccl: 8 B, message from an actor, time", 1.5, sum("nccl", "message", 8, 8)),
      at_most("nccl: 8 B, rank-local, time", 1.3, sum("nccl", "rank_local", 8, 8)),
      at_most("nccl: 4 KiB, 256 in flight, facade, time", 1.3,
              sum("nccl", "facade", 4 * kib, 4 * kib, 256)),
      at_least("nccl: 64 MiB and more, facade, bandwidth", 0.97,
               sum("nccl", "facade", 64 * mib, 1024 * mib)),
      at_most("direct: all_reduce to 256 KiB, facade, time", 0.75,
              sum("direct", "facade", 0, 256 * kib)),
      at_most("direct: all_reduce to 256 KiB, rank-local, time", 0.9,
              sum("direct", "rank_local", 0, 256 * kib)),
      at_most("direct: all_reduce to 256 KiB, message, time", 1.2,
              sum("direct", "message", 0, 256 * kib)),
      at_most("direct: all_reduce of 1 MiB, facade, time", 0.95, sum("direct", "facade", mib, mib)),
      at_least("direct: all_reduce of 4 to 256 MiB, facade, bandwidth", 1.05,
               sum("direct", "facade", 4 * mib, 256 * mib)),
      at_least("direct: all_reduce of 1 GiB, facade, bandwidth", 0.995,
               sum("direct", "facade", 1024 * mib, 1024 * mib)),
      at_most("direct: other verbs to 64 KiB, facade, time", 0.8,
              {"direct", "facade", {}, 0, 64 * kib}),
      at_least("direct: all_gather, reduce_scatter, 64 MiB, bandwidth", 1,
               {"direct", "facade", {"all_gather", "reduce_scatter"}, 64 * mib, 64 * mib}),
      at_most("direct: 4 KiB, 256 in flight, facade, time", 0.75,
              sum("direct", "facade", 4 * kib, 4 * kib, 256)),
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
