// Compares collectives and messages through troupe, by NCCL and by direct collectives, with NCCL
// alone, in one run and in turns. The results of each contestant are checked by value before it is
// timed. On the host backend troupe runs alone. Also takes options of the library and of CAF, such
// as --troupe.spin=0.

#include "machine.hpp"
#include "measure.hpp"
#include "must.hpp"
#include "settings.hpp"
#include "troupe_modes.hpp"
#include "tuning.hpp"
#include "verb_report.hpp"
#include "watchdog.hpp"
#include <troupe/troupe.hpp>

#if TROUPE_HAS_CUDA
#include "raw_nccl.hpp"
#endif

#include <caf/all.hpp>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

using namespace std::chrono_literals;

namespace {

constexpr std::size_t kib = std::size_t{1} << 10, mib = kib << 10, gib = mib << 10;
constexpr std::size_t blocking_sizes[] = {8,   512,      4 * kib,  32 * kib,  256 * kib,
                                          mib, 16 * mib, 64 * mib, 256 * mib, gib};
constexpr std::size_t pipelined_sizes[] = {8, 4 * kib, 64 * kib, mib, 64 * mib};

/// Limit for a rank's buffer, and for the bytes of all operations in flight. More takes long and
/// shows nothing new.
constexpr std::size_t most_bytes = gib;

struct settings : bench::common_settings {
  std::vector<std::string> verbs; ///< empty: all_reduce; for a way table, all
  std::vector<std::string> ways;  ///< empty: all that the machine has
  std::vector<std::string> modes; ///< empty: all
  std::vector<std::size_t> sizes; ///< empty: the benchmark's own
  std::vector<std::size_t> windows{16, 64, 256};
  std::size_t min_bytes = 8;
  std::size_t max_bytes = 0;
  std::size_t rounds = 0;
  std::size_t segment_ms = 0;
  bool blocking_only = false;
  bool quick = false;
  std::string way_table; ///< file to write; empty: none

  /// Returns whether the way was named in the options.
  bool names(const std::string& way) const {
    return std::find(ways.begin(), ways.end(), way) != ways.end();
  }
  bool has_way(const std::string& way) const { return ways.empty() || names(way); }
  bool has_mode(std::string_view mode) const {
    return modes.empty() || std::find(modes.begin(), modes.end(), mode) != modes.end();
  }
};

/// The contestants of a run, and the worlds that they use.
struct scene {
  std::map<std::string, troupe::world> worlds; ///< by way
  bool raw = false;                            ///< NCCL by hand takes part
  std::vector<std::unique_ptr<bench::contestant>> contestants;
};

/// Adds the cells of a verb, without contestants.
void add_cells(const settings& s, const bench::verb& what, std::size_t ranks,
               std::vector<bench::cell>& cells) {
  const auto blocks = what.most_blocks(ranks);
  const auto add = [&](std::size_t size_bytes, std::size_t window) {
    if (size_bytes * blocks * window > most_bytes)
      return;
    bench::cell x;
    x.what = what.name;
    x.size_bytes = size_bytes;
    x.window = window;
    cells.push_back(std::move(x));
  };
  const auto sizes_of = [&](auto& by_default) {
    std::vector<std::size_t> result = s.sizes;
    if (s.sizes.empty())
      std::copy_if(std::begin(by_default), std::end(by_default), std::back_inserter(result),
                   [&](std::size_t size_bytes) {
                     return size_bytes >= s.min_bytes && size_bytes <= s.max_bytes;
                   });
    return blocks == 0 ? std::vector<std::size_t>{0} : result;
  };
  for (auto size_bytes : sizes_of(blocking_sizes))
    add(size_bytes, 1);
  if (s.blocking_only)
    return;
  for (auto size_bytes : sizes_of(pipelined_sizes))
    for (auto window : s.windows)
      add(size_bytes, window);
}

std::vector<bench::cell> plan(const settings& s, std::size_t ranks) {
  std::vector<bench::cell> cells;
  for (auto& name : s.verbs) {
    const auto& what = *bench::find_verb(name);
    if (ranks >= what.least_ranks)
      add_cells(s, what, ranks, cells);
    else
      std::printf("%s is left out: it needs %zu ranks\n", name.c_str(), what.least_ranks);
  }
  return cells;
}

bench::footprint memory_for(const std::vector<bench::cell>& cells, std::size_t ranks) {
  bench::footprint result;
  for (auto& x : cells) {
    const auto& what = *bench::find_verb(x.what);
    result.send_bytes = std::max(result.send_bytes, x.size_bytes * what.send.blocks(ranks));
    if (!what.in_place())
      result.recv_bytes = std::max(result.recv_bytes, x.size_bytes * what.recv.blocks(ranks));
  }
  return result;
}

/// Opens a world for each way. A way that the options do not name is left out where it cannot be
/// had.
caf::expected<std::map<std::string, troupe::world>> open_worlds(const settings& s,
                                                                caf::actor_system& sys) {
  std::map<std::string, troupe::world> result;
  for (const auto policy : {troupe::collectives_policy::nccl, troupe::collectives_policy::direct}) {
    const std::string way{to_string(policy)};
    if (!s.has_way(way))
      continue;
    auto world =
        troupe::world::open(sys, {.devices = s.devices, .name = way, .collectives = policy});
    if (world)
      result.emplace(way, std::move(*world));
    else if (s.names(way) || policy == troupe::collectives_policy::nccl)
      return world.error();
    else
      std::printf("%s is left out: %s\n", way.c_str(), troupe::describe(world.error()).c_str());
  }
  return result;
}

/// Makes the contestants of all verbs, and adds them to the cells.
void add_contestants(const settings& s, caf::actor_system& sys, std::size_t ranks, scene& from,
                     std::vector<bench::cell>& cells) {
  const auto memory = memory_for(cells, ranks);
  std::map<std::string, bench::contestant_maker, std::less<>> makers;
  for (auto& [way, world] : from.worlds)
    makers.emplace(way, bench::troupe_maker(sys, world, memory));
#if TROUPE_HAS_CUDA
  if (from.raw)
    makers.emplace("raw", bench::raw_maker(s.devices, memory));
#endif
  for (auto& name : s.verbs)
    for (auto& label : bench::all_labels()) {
      const auto maker = makers.find(label.way);
      if (maker == makers.end() || !s.has_mode(label.mode))
        continue;
      from.contestants.push_back(maker->second(*bench::find_verb(name), label));
      for (auto& x : cells)
        if (x.what == name && (x.window == 1 || label.pipelined)) {
          x.has_reference |= &label == bench::all_labels().data();
          x.contestants.push_back(from.contestants.back().get());
        }
    }
  std::erase_if(cells, [](const bench::cell& x) { return x.contestants.empty(); });
}

std::string spin_of(const std::vector<std::string>& library_options) {
  const std::string option = "--troupe.spin=";
  for (auto& x : library_options)
    if (x.starts_with(option))
      return x.substr(option.size()) + " us";
  return "default: 200 us where there are two cores for each device and two more, else none";
}

/// Describes the machine and the settings of the run.
nlohmann::ordered_json description(const settings& s, const std::string& backend,
                                   const std::vector<std::string>& library_options,
                                   const nlohmann::ordered_json& machine) {
  auto result = machine;
  result["backend"] = backend;
  result["library_options"] = library_options;
  result["lane_spin"] = spin_of(library_options);
  result["rounds"] = s.rounds;
  result["segment_ms"] = s.segment_ms;
  return result;
}

/// Returns the CPU time that the open worlds use while they do nothing.
double idle_percent_of(const scene& from) {
  for (auto& [way, world] : from.worlds)
    for (int i = 0; i < 100; ++i)
      bench::must(world.barrier().wait());
  std::this_thread::sleep_for(50ms); // spinning threads are parked by then
  return bench::idle_percent(2s);
}

/// Measures all cells, and writes the report.
bool compare(const settings& s, bench::outcome& result, bench::watchdog& guard,
             std::chrono::steady_clock::time_point start) {
  bench::measure(result.cells, {s.rounds, std::chrono::milliseconds{s.segment_ms}}, guard);
  guard.enter("the report");
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
  result.machine["seconds"] = time.count();
  const auto bars = bench::bars_of(result);
  bench::print_table(result);
  bench::print_bars(bars);
  std::printf("%.0f s, every result right\n", time.count());
  bench::write_json(s.json_file, bench::to_json(result, bars));
  if (!s.way_table.empty())
    bench::write_way_table(s.way_table, result);
  guard.enter("shutting down");
  return s.pass(bars);
}

caf::expected<bool> run(settings& s, caf::actor_system& sys, bench::watchdog& guard,
                        const std::vector<std::string>& library_options) {
  const auto start = std::chrono::steady_clock::now();
  guard.enter("opening the worlds");
  auto list = troupe::list_devices(sys);
  if (!list)
    return list.error();
  const bool cuda = list->backend == "cuda";
  if (s.devices.empty())
    s.devices = list->ordinals;
  if (s.max_bytes == 0)
    s.max_bytes = !cuda ? 64 * kib : s.quick ? 64 * mib : gib;
  if (!cuda && s.names("raw"))
    bench::fail("the way raw needs the CUDA backend");
  scene all;
  all.raw = cuda && s.has_way("raw");
  auto worlds = open_worlds(s, sys);
  if (!worlds)
    return worlds.error();
  all.worlds = std::move(*worlds);
  if (all.worlds.empty())
    bench::fail("--ways has to name nccl or direct");
  const auto& world = all.worlds.begin()->second;

  bench::outcome result;
  result.ranks = world.size();
  result.machine = description(s, list->backend, library_options, bench::describe_machine(world));
  std::printf("float32, sizes are bytes of one rank's block, all_reduce in place, %zu ranks, "
              "backend %s%s\n%s\n",
              result.ranks, list->backend.c_str(),
              list->reason.empty() ? "" : (" (" + list->reason + ")").c_str(),
              bench::summary(result.machine).c_str());
  guard.enter("idle worlds");
  result.idle_percent = idle_percent_of(all);
  guard.enter("making the contestants");
  result.cells = plan(s, result.ranks);
  add_contestants(s, sys, result.ranks, all, result.cells);
  if (result.cells.empty())
    bench::fail("nothing to compare: no verb, size and mode is left");
  return compare(s, result, guard, start);
}

void add_options(CLI::App& app, settings& s) {
  std::vector<std::string> verbs{"all"};
  std::set<std::string> modes; // several ways have the same
  for (auto& x : bench::all_verbs())
    verbs.emplace_back(x.name);
  for (auto& x : bench::all_labels())
    modes.emplace(x.mode);
  s.add_to(app);
  s.add_devices_to(app);
  app.add_option("--verb", s.verbs,
                 "verbs to compare, or all; by default all_reduce, for --tune all")
      ->delimiter(',')
      ->check(CLI::IsMember(verbs));
  app.add_option("--ways", s.ways, "raw (NCCL by hand), nccl and direct (troupe); all by default")
      ->delimiter(',')
      ->check(CLI::IsMember({"raw", "nccl", "direct"}));
  app.add_option("--modes", s.modes,
                 "threads and grouped (of raw), facade, message and rank_local (of troupe); all by "
                 "default. Ratios are to threads")
      ->delimiter(',')
      ->check(CLI::IsMember(modes));
  auto* sizes = app.add_option("--sizes", s.sizes,
                               "sizes: bytes of one rank's block. Left out if a rank's buffer "
                               "would be larger than 1 GiB: it has a block for each rank in some "
                               "verbs")
                    ->delimiter(',')
                    ->check(CLI::Range(sizeof(float), gib));
  app.add_option("--min", s.min_bytes, "smallest of the default sizes")
      ->excludes(sizes)
      ->capture_default_str();
  app.add_option("--max", s.max_bytes,
                 "largest of the default sizes; 1 GiB on GPUs (--quick: 64 MiB), 64 KiB without")
      ->excludes(sizes)
      ->check(CLI::Range(std::size_t{8}, gib));
  app.add_option("--windows", s.windows, "operations in flight where they are pipelined")
      ->delimiter(',')
      ->check(CLI::Range(2, 512)) // the launch queue holds about 1,024
      ->capture_default_str();
  app.add_flag("--blocking-only", s.blocking_only, "only one operation after the other");
  app.add_option("--rounds", s.rounds, "by default 5 (--quick: 3)")->check(CLI::PositiveNumber);
  app.add_option("--segment-ms", s.segment_ms,
                 "how long a contestant runs at a time; by default 40 (--quick: 20)")
      ->check(CLI::PositiveNumber);
  app.add_flag("--quick", s.quick, "a look, within seconds for each verb");
  app.add_option(
      "--tune", s.way_table,
      "file to write a table to of what goes direct (troupe::read_way_table), for this "
      "machine and number of ranks. Compares the ways nccl and direct, as blocking calls "
      "of the facade");
}

/// Replaces values that were left to the benchmark.
void complete(settings& s) {
  std::vector<std::string> chosen;
  if (s.verbs.empty())
    s.verbs = {s.way_table.empty() ? "all_reduce" : "all"};
  const bool all = std::find(s.verbs.begin(), s.verbs.end(), "all") != s.verbs.end();
  for (auto& x : bench::all_verbs()) // each once
    if (all || std::find(s.verbs.begin(), s.verbs.end(), x.name) != s.verbs.end())
      chosen.emplace_back(x.name);
  s.verbs = std::move(chosen);
  if (!s.way_table.empty()) {
    s.ways = {"nccl", "direct"};
    s.modes = {"facade"};
    s.blocking_only = true;
  }
  for (auto& x : s.sizes)
    x -= x % sizeof(float);
  const auto by_default = [&](std::size_t& x, std::size_t full, std::size_t quick) {
    if (x == 0)
      x = s.quick ? quick : full;
  };
  by_default(s.rounds, 5, 3);
  by_default(s.segment_ms, 40, 20);
  by_default(s.time_limit_s, 300 * s.verbs.size(), 120 * s.verbs.size());
}

} // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  settings s;
  CLI::App app{"Collectives through troupe beside the same ones by NCCL alone. Sizes are bytes of "
               "one rank's block: what a rank gives to an all_reduce, or what goes from one rank "
               "to another"};
  add_options(app, s);
  CLI11_PARSE(app, argc, argv);
  complete(s);

  bench::watchdog guard{std::chrono::seconds{s.time_limit_s}};
  troupe::config cfg;
  auto library_options = app.remaining();
  library_options.push_back("--troupe.backend=" + s.backend);
  if (auto error = cfg.parse(library_options))
    bench::fail(troupe::describe(error));
  if (cfg.help_printed())
    return 0;
  bool passed = false;
  {
    caf::actor_system sys{cfg};
    auto result = run(s, sys, guard, library_options);
    if (!result)
      bench::fail(troupe::describe(result.error()));
    passed = *result;
  }
  return passed ? 0 : 1;
}
