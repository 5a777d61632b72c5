#include "tuning.hpp"

#include "machine.hpp"
#include "must.hpp"
#include "report.hpp"
#include "statistics.hpp"
#include "verb_contestant.hpp"
#include "verbs.hpp"
#include <troupe/way_table.hpp>

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <sstream>
#include <string_view>

namespace bench {

namespace {

std::optional<double> time_of(const cell& x, std::string_view way) {
  for (auto& s : x.results)
    if (auto& label = label_of(s.name); label.way == way && label.mode == "facade")
      return median(s.rounds);
  return std::nullopt;
}

/// Returns the largest block that goes direct, by the cells of a verb in the order of their sizes.
std::uint64_t largest_direct(const outcome& o, const verb& of) {
  std::map<std::size_t, bool> wins; // by size
  for (auto& x : o.cells) {
    if (x.what != of.name || x.window != 1)
      continue;
    const auto direct = time_of(x, "direct");
    const auto nccl = time_of(x, "nccl");
    if (!direct || !nccl)
      fail("--tune needs both ways, direct and nccl, as calls of the facade");
    wins[x.size_bytes] = *direct <= *nccl;
  }
  std::uint64_t result = 0;
  for (auto& [size_bytes, won] : wins) {
    if (!won)
      return result;
    result = size_bytes;
  }
  return troupe::way_table::no_limit;
}

} // namespace

void write_way_table(const std::string& file, const outcome& x) {
  std::map<troupe::collective_kind, std::uint64_t> limits; // several verbs are messages
  for (auto& v : all_verbs())
    if (v.most_blocks(x.ranks) != 0 &&
        std::ranges::any_of(x.cells, [&](auto& c) { return c.what == v.name; })) {
      const auto limit = largest_direct(x, v);
      const auto [at, first] = limits.emplace(v.call, limit);
      if (!first)
        at->second = std::min(at->second, limit);
    }
  if (limits.empty())
    fail("--tune needs a verb with buffers");
  std::size_t largest = 0;
  for (auto& c : x.cells)
    largest = std::max(largest, c.size_bytes);
  std::ostringstream to;
  to << "# ranks, kind of collective, largest block that goes direct: bytes, or all\n"
     << "# measured up to " << largest << " bytes: " << summary(x.machine) << '\n';
  for (auto& [kind, limit] : limits) {
    to << x.ranks << ' ' << troupe::to_string(kind) << ' ';
    if (limit == troupe::way_table::no_limit)
      to << "all\n";
    else
      to << limit << '\n';
  }
  write_file(file, to.str());
}

} // namespace bench
