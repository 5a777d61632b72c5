// Compares all-reduces through troupe with NCCL alone, in one run and in turns. The sums of each
// contestant are checked by value before it is timed. On the host backend troupe runs alone. Also
// takes options of the library and of CAF, such as --troupe.spin=0.

#include "machine.hpp"
#include "measure.hpp"
#include "report.hpp"
#include "troupe_modes.hpp"
#include "watchdog.hpp"
#include <troupe/troupe.hpp>

#if TROUPE_HAS_CUDA
#include "raw_nccl.hpp"
#include "settings.hpp"
#endif

#include <caf/all.hpp>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <string>
#include <vector>

using namespace std::chrono_literals;

namespace {

constexpr std::size_t kib = std::size_t{1} << 10, mib = kib << 10, gib = mib << 10;
constexpr std::size_t blocking_sizes[] = {8,   512,      4 * kib,  32 * kib,  256 * kib,
                                          mib, 16 * mib, 64 * mib, 256 * mib, gib};
constexpr std::size_t pipelined_sizes[] = {8, 4 * kib, 64 * kib, mib, 64 * mib};

/// Limit for the bytes of all operations in flight. More takes long and shows nothing new.
constexpr std::size_t most_in_flight = gib;

struct settings : bench::common_settings {
  std::vector<std::size_t> windows{16, 64, 256};
  std::size_t min_bytes = 8;
  std::size_t max_bytes = 0;
  std::size_t rounds = 0;
  std::size_t segment_ms = 0;
  bool quick = false;
};

/// All contestants. `threads` and `grouped` exist with CUDA only.
struct contestants {
  bench::troupe_contestants troupe;
  std::unique_ptr<bench::contestant> threads;
  std::unique_ptr<bench::contestant> grouped;
};

std::vector<bench::cell> plan(const settings& s, const contestants& c) {
  std::vector<bench::cell> cells;
  const auto add = [&](std::size_t size_bytes, std::size_t window) {
    if (size_bytes < s.min_bytes || size_bytes > s.max_bytes)
      return;
    bench::cell x;
    x.size_bytes = size_bytes;
    x.window = window;
    x.has_reference = c.threads != nullptr;
    if (c.threads)
      x.contestants.push_back(c.threads.get());
    x.contestants.push_back(c.troupe.facade.get());
    x.contestants.push_back(c.troupe.message.get());
    x.contestants.push_back(c.troupe.rank_local.get());
    if (c.grouped && window == 1)
      x.contestants.push_back(c.grouped.get());
    cells.push_back(std::move(x));
  };
  for (auto size_bytes : blocking_sizes)
    add(size_bytes, 1);
  for (auto size_bytes : pipelined_sizes)
    for (auto window : s.windows)
      if (size_bytes * window <= most_in_flight)
        add(size_bytes, window);
  return cells;
}

std::string spin_of(const std::vector<std::string>& library_options) {
  const std::string option = "--troupe.spin=";
  for (auto& x : library_options)
    if (x.starts_with(option))
      return x.substr(option.size()) + " us";
  return "default: 200 us where there are two cores for each device and two more, else none";
}

caf::expected<bool> run(settings& s, caf::actor_system& sys, bench::watchdog& guard,
                        const std::vector<std::string>& library_options) {
  const auto start = std::chrono::steady_clock::now();
  guard.enter("opening the world");
  auto list = troupe::list_devices(sys);
  if (!list)
    return list.error();
  const bool cuda = list->backend == "cuda";
  if (s.devices.empty())
    s.devices = list->ordinals;
  if (s.max_bytes == 0)
    s.max_bytes = !cuda ? 64 * kib : s.quick ? 64 * mib : gib;
  auto world = troupe::world::open(sys, {.devices = s.devices});
  if (!world)
    return world.error();

  bench::outcome result;
  result.ranks = world->size();
  result.machine = bench::describe_machine(*world);
  result.machine["backend"] = list->backend;
  result.machine["library_options"] = library_options;
  result.machine["lane_spin"] = spin_of(library_options);
  result.machine["rounds"] = s.rounds;
  result.machine["segment_ms"] = s.segment_ms;
  std::printf("all-reduce of float32 sums in place, %zu ranks, backend %s%s\n%s\n", result.ranks,
              list->backend.c_str(),
              list->reason.empty() ? "" : (" (" + list->reason + ")").c_str(),
              bench::summary(result.machine).c_str());

  contestants all;
  all.troupe = bench::make_troupe(sys, *world, s.max_bytes);
  guard.enter("an idle world");
  all.troupe.facade->run(sizeof(float), 100, 1);
  std::this_thread::sleep_for(50ms); // spinning threads are parked by then
  result.idle_percent = bench::idle_percent(2s);
#if TROUPE_HAS_CUDA
  if (cuda) {
    guard.enter("making NCCL's own communicator");
    auto raw = bench::make_raw(s.devices, s.max_bytes);
    all.threads = std::move(raw.threads);
    all.grouped = std::move(raw.grouped);
  }
#endif

  result.cells = plan(s, all);
  bench::measure(result.cells, {s.rounds, std::chrono::milliseconds{s.segment_ms}}, guard);
  guard.enter("the report");
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
  result.machine["seconds"] = time.count();
  const auto bars = bench::bars_of(result);
  bench::print_table(result);
  bench::print_bars(bars);
  std::printf("%.0f s, every sum right\n", time.count());
  bench::write_json(s.json_file, bench::to_json(result, bars));
  guard.enter("shutting down");
  return s.pass(bars);
}

} // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  settings s;
  CLI::App app{"All-reduces through troupe beside the same ones by NCCL alone"};
  s.add_to(app);
  s.add_devices_to(app);
  app.add_option("--min", s.min_bytes, "smallest size, in bytes per rank")->capture_default_str();
  app.add_option("--max", s.max_bytes,
                 "largest size; by default 1 GiB on GPUs (--quick: 64 MiB), 64 KiB without")
      ->check(CLI::Range(std::size_t{8}, gib));
  app.add_option("--windows", s.windows, "operations in flight where they are pipelined")
      ->delimiter(',')
      ->check(CLI::Range(2, 512)) // the launch queue holds about 1,024
      ->capture_default_str();
  app.add_option("--rounds", s.rounds, "by default 5 (--quick: 3)")->check(CLI::PositiveNumber);
  app.add_option("--segment-ms", s.segment_ms,
                 "how long a way runs at a time; by default 40 (--quick: 20)")
      ->check(CLI::PositiveNumber);
  app.add_flag("--quick", s.quick, "a look, within seconds");
  CLI11_PARSE(app, argc, argv);
  const auto by_default = [&](std::size_t& x, std::size_t full, std::size_t quick) {
    if (x == 0)
      x = s.quick ? quick : full;
  };
  by_default(s.rounds, 5, 3);
  by_default(s.segment_ms, 40, 20);
  by_default(s.time_limit_s, 180, 60);

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
