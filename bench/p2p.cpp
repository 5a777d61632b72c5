// Compares copies between devices through troupe with CUDA alone, in one run and in turns: over the
// links, in pool memory and in plain memory, and through the host without peer access. Contents are
// checked by value before times count. On the host backend troupe runs alone. Also takes options of
// the library and of CAF, such as --troupe.spin=0.

#include "machine.hpp"
#include "measure.hpp"
#include "must.hpp"
#include "report.hpp"
#include "statistics.hpp"
#include "troupe_copies.hpp"
#include "watchdog.hpp"
#include <troupe/troupe.hpp>

#if TROUPE_HAS_CUDA
#include "raw_copies.hpp"
#include "settings.hpp"
#endif

#include <caf/all.hpp>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace {

using bench::must;

constexpr std::size_t kib = std::size_t{1} << 10, mib = kib << 10, gib = mib << 10;
constexpr std::size_t blocking_sizes[] = {4 * kib, 16 * kib, 64 * kib, 256 * kib, mib,
                                          4 * mib, 16 * mib, 64 * mib, 256 * mib, gib};
constexpr std::size_t in_flight = 64;
constexpr std::size_t pipelined_sizes[] = {4 * kib, 64 * kib, mib};

struct settings : bench::common_settings {
  std::size_t min_bytes = 4 * kib;
  std::size_t max_bytes = 0;
  std::size_t rounds = 0;
  std::size_t segment_ms = 0;
  bool quick = false;

  std::size_t buffer_bytes() const { return std::max(max_bytes, in_flight * pipelined_sizes[0]); }
};

enum class pattern : std::uint8_t { one_direction, both_directions, all_pairs };
enum class memory_kind : std::uint8_t { pool, plain };

const char* to_string(pattern x) {
  switch (x) {
  case pattern::one_direction:
    return "one direction";
  case pattern::both_directions:
    return "both directions";
  case pattern::all_pairs:
    break;
  }
  return "all pairs";
}

const char* to_string(memory_kind x) { return x == memory_kind::pool ? "pool" : "plain"; }

/// The kind of copies in a cell.
struct scene {
  pattern who = pattern::one_direction;
  memory_kind memory = memory_kind::pool; ///< of the contestants without troupe
  bool staged = false;
  std::size_t routes = 1;

  std::string text() const {
    return std::string{staged ? "staged, " : ""} + to_string(who) + ", " + to_string(memory) +
           " memory";
  }
};

struct outcome {
  nlohmann::ordered_json machine;
  std::vector<scene> scenes; // of each cell
  std::vector<bench::cell> cells;
};

// -- memory and contestants

/// Selects the routes of pattern `who` from `routes`, which has all pairs.
std::vector<bench::route> routes_of(pattern who, const std::vector<bench::route>& routes) {
  if (who == pattern::all_pairs)
    return routes;
  const auto there = routes.front();
  if (who == pattern::one_direction)
    return {there};
  return {there, {there.to, there.from}};
}

/// Selects the entries of `all` for `routes`, in their order.
template <class T>
std::vector<T> select(const std::vector<T>& all, const std::vector<bench::route>& routes) {
  std::vector<T> result;
  for (auto& way : routes)
    result.push_back(
        *std::find_if(all.begin(), all.end(), [&](const T& x) { return x.way == way; }));
  return result;
}

/// Allocates as a program without the library does.
std::shared_ptr<void> plain_memory(bool cuda, int device, std::size_t size_bytes) {
#if TROUPE_HAS_CUDA
  if (cuda)
    return bench::plain_memory(device, size_bytes);
#else
  (void)cuda;
  (void)device;
#endif
  constexpr auto alignment = std::align_val_t{4096};
  return {::operator new(size_bytes, alignment), [=](void* x) { ::operator delete(x, alignment); }};
}

std::vector<bench::route_memory>
plain_memory_for(bool cuda, const std::vector<bench::route>& routes, std::size_t size_bytes) {
  std::vector<bench::route_memory> result;
  for (auto& x : routes)
    result.push_back(
        {x, plain_memory(cuda, x.from, size_bytes), plain_memory(cuda, x.to, size_bytes)});
  return result;
}

using contestants = std::vector<std::unique_ptr<bench::copying_contestant>>;

/// Makes the contestants with CUDA alone; none without CUDA.
contestants raw_contestants(const std::vector<bench::route_memory>& memory) {
#if TROUPE_HAS_CUDA
  return bench::make_raw_copies(memory);
#else
  (void)memory;
  return {};
#endif
}

/// Allocates pool memory as the library does, by direct calls; none without CUDA.
std::vector<bench::route_memory> raw_pool_memory(const std::vector<int>& devices,
                                                 const std::vector<bench::route>& routes,
                                                 std::size_t size_bytes) {
  std::vector<bench::route_memory> result;
#if TROUPE_HAS_CUDA
  std::map<int, std::shared_ptr<bench::memory_pool>> pools;
  for (const int x : devices)
    pools[x] = bench::make_pool(x, devices);
  for (auto& x : routes)
    result.push_back({x, bench::pool_memory(pools.at(x.from), size_bytes),
                      bench::pool_memory(pools.at(x.to), size_bytes)});
#else
  (void)devices;
  (void)routes;
  (void)size_bytes;
#endif
  return result;
}

/// Returns the fastest contestant without the library.
bench::contestant& best_of(const contestants& raw, std::size_t size_bytes, std::size_t window,
                           bench::watchdog& guard) {
  constexpr std::size_t turns = 3;
  const auto operations = std::max<std::size_t>(size_bytes > mib ? 5 : 200, 4 * window);
  std::vector<std::vector<double>> times(raw.size());
  for (std::size_t turn = 0; turn <= turns && raw.size() > 1; ++turn)
    for (std::size_t i = 0; i < raw.size(); ++i) {
      guard.enter("trial of " + raw[i]->name());
      const auto time = raw[i]->run(size_bytes, operations, window);
      if (turn != 0) // the first one warms up
        times[i].push_back(time.each.empty() ? time.per_operation : bench::median(time.each));
    }
  std::size_t best = 0;
  for (std::size_t i = 1; i < raw.size(); ++i)
    if (bench::median(times[i]) < bench::median(times[best]))
      best = i;
  return *raw[best];
}

/// Adds cells of all sizes.
void add_cells(const settings& s, const scene& where, const contestants& raw,
               const contestants& troupe, bench::watchdog& guard, outcome& result) {
  const auto add = [&](std::size_t size_bytes, std::size_t window) {
    if (size_bytes < s.min_bytes || size_bytes > s.max_bytes ||
        size_bytes * window > s.buffer_bytes())
      return;
    bench::cell x;
    x.what = where.text();
    x.size_bytes = size_bytes;
    x.window = window;
    x.has_reference = !raw.empty();
    if (!raw.empty())
      x.contestants.push_back(&best_of(raw, size_bytes, window, guard));
    for (auto& who : troupe)
      x.contestants.push_back(who.get());
    result.scenes.push_back(where);
    result.cells.push_back(std::move(x));
  };
  for (auto size_bytes : blocking_sizes)
    add(size_bytes, 1);
  if (where.who == pattern::one_direction && !where.staged)
    for (auto size_bytes : pipelined_sizes)
      add(size_bytes, in_flight);
}

// -- runs

/// State shared by all runs.
struct setting {
  bool cuda = false;
  std::vector<troupe::device> devices;
  std::vector<bench::route> routes; // of all pairs
  std::vector<bench::route_memory> plain;
  std::vector<bench::route_refs> plain_refs;
  std::vector<bench::route_refs> pool_refs;
};

void measure(const settings& s, bench::watchdog& guard, outcome& to, outcome&& from) {
  bench::measure(from.cells, {s.rounds, std::chrono::milliseconds{s.segment_ms}}, guard);
  for (auto& x : from.cells)
    x.contestants.clear(); // results outlive the contestants
  std::move(from.cells.begin(), from.cells.end(), std::back_inserter(to.cells));
  std::move(from.scenes.begin(), from.scenes.end(), std::back_inserter(to.scenes));
}

/// Runs copies without peer access: through the host, as the driver does.
void run_staged(const settings& s, const setting& all, caf::actor_system& sys,
                bench::watchdog& guard, outcome& result) {
  guard.enter("opening the topology without links");
  const auto links = must(troupe::topology::open(sys, {.devices = s.devices, .use_links = false}));
  outcome part;
  std::vector<contestants> owners;
  for (const auto who : {pattern::one_direction, pattern::both_directions}) {
    const auto ways = routes_of(who, all.routes);
    contestants raw;
    if (all.cuda)
      raw = raw_contestants(select(all.plain, ways));
    contestants troupe;
    const auto add = [&](const char* name, const std::vector<bench::route_refs>& refs) {
      troupe.push_back(bench::make_troupe_copies(name, links, all.devices, select(refs, ways)));
    };
    add("troupe", all.plain_refs);
    add("troupe, pool memory", all.pool_refs);
    add_cells(s, {who, memory_kind::plain, true, ways.size()}, raw, troupe, guard, part);
    owners.push_back(std::move(raw));
    owners.push_back(std::move(troupe));
  }
  measure(s, guard, result, std::move(part));
  if (const auto n = links.stats().direct_copies; n != 0)
    bench::fail(std::to_string(n) + " copies without links went over them");
}

/// Runs copies over the links where access exists.
void run_direct(const settings& s, const setting& all, caf::actor_system& sys,
                bench::watchdog& guard, outcome& result) {
  guard.enter("opening the topology");
  const auto links = must(troupe::topology::open(sys, {.devices = s.devices}));
  const auto graph = links.graph();
  for (auto& x : graph.links)
    result.machine["links"].push_back({{"from", x.from},
                                       {"to", x.to},
                                       {"kind", to_string(x.kind)},
                                       {"nvlinks", x.links},
                                       {"access", to_string(x.access)}});
  std::vector<bench::route_memory> raw_pool;
  if (all.cuda) {
    guard.enter("taking memory of pools by hand");
    raw_pool = raw_pool_memory(s.devices, all.routes, s.buffer_bytes());
#if TROUPE_HAS_CUDA
    bench::enable_access(s.devices);
#endif
  }
  outcome part;
  std::vector<contestants> owners;
  for (const auto memory : {memory_kind::pool, memory_kind::plain})
    for (const auto who : {pattern::one_direction, pattern::both_directions, pattern::all_pairs}) {
      if (who == pattern::all_pairs && s.devices.size() < 3)
        continue;
      const auto ways = routes_of(who, all.routes);
      const bool is_pool = memory == memory_kind::pool;
      contestants raw;
      if (all.cuda)
        raw = raw_contestants(select(is_pool ? raw_pool : all.plain, ways));
      contestants troupe;
      troupe.push_back(bench::make_troupe_copies(
          "troupe", links, all.devices, select(is_pool ? all.pool_refs : all.plain_refs, ways)));
      add_cells(s, {who, memory, false, ways.size()}, raw, troupe, guard, part);
      owners.push_back(std::move(raw));
      owners.push_back(std::move(troupe));
    }
  measure(s, guard, result, std::move(part));
  const bool all_enabled = std::all_of(graph.links.begin(), graph.links.end(), [](auto& x) {
    return x.access == troupe::peer_access::enabled;
  });
  if (const auto n = links.stats().staged_copies; all_enabled && n != 0)
    bench::fail(std::to_string(n) + " copies went through the host, although there are links");
}

// -- the report

double gb_per_s(const scene& where, const bench::cell& x, double us) {
  return static_cast<double>(x.size_bytes * where.routes) / us / 1e3;
}

/// Returns the median ratio of the time of `name` in a cell, if measured.
std::optional<double> ratio_of(const outcome& o, const scene& where, std::size_t size_bytes,
                               std::size_t window, const std::string& name) {
  for (std::size_t i = 0; i < o.cells.size(); ++i)
    if (o.scenes[i].text() == where.text() && o.cells[i].size_bytes == size_bytes &&
        o.cells[i].window == window)
      for (auto& s : o.cells[i].results)
        if (s.name == name && !s.ratios.empty())
          return bench::median(s.ratios);
  return std::nullopt;
}

std::vector<bench::bar> bars_of(const outcome& o, std::size_t devices) {
  std::vector<bench::bar> result;
  const auto time = [&](memory_kind memory, std::size_t window, double limit) {
    const scene where{pattern::one_direction, memory};
    result.push_back({std::string{"4 KiB, "} + (window > 1 ? "64 in flight, " : "") +
                          to_string(memory) + " memory, time to raw",
                      limit, true, ratio_of(o, where, 4 * kib, window, "troupe")});
  };
  const auto rate = [&](const std::string& what, const scene& where, const std::string& name,
                        double limit) {
    auto ratio = ratio_of(o, where, gib, 1, name);
    if (ratio)
      ratio = 1 / *ratio;
    result.push_back({"1 GiB, " + what, limit, false, ratio});
  };
  for (const auto memory : {memory_kind::pool, memory_kind::plain}) {
    time(memory, 1, 2);
    time(memory, in_flight, 1.3);
    for (const auto who : {pattern::one_direction, pattern::both_directions, pattern::all_pairs})
      if (who != pattern::all_pairs || devices > 2)
        rate(scene{who, memory}.text() + ", bandwidth to raw", {who, memory}, "troupe",
             who == pattern::all_pairs ? 0.97 : 0.98);
  }
  const scene staged{pattern::one_direction, memory_kind::plain, true};
  rate("staged, plain memory, bandwidth to the driver's", staged, "troupe", 0.9);
  rate("staged, pool memory, bandwidth to the driver's", staged, "troupe, pool memory", 0.9);
  return result;
}

void print_table(const outcome& o) {
  std::string last;
  for (std::size_t i = 0; i < o.cells.size(); ++i) {
    auto& x = o.cells[i];
    if (const auto text = o.scenes[i].text(); text != last) {
      std::printf("\n%s\n%12s %6s  %-24s %11s %11s %10s %7s\n", text.c_str(), "bytes", "window", "",
                  "median us", "p99 us", "GB/s", "ratio");
      last = text;
    }
    for (auto& s : x.results) {
      const auto us = bench::median(s.rounds);
      std::printf("%12zu %6zu  %-24s %11.2f ", x.size_bytes, x.window, s.name.c_str(), us);
      if (s.each.empty())
        std::printf("%11s ", "");
      else
        std::printf("%11.2f ", bench::quantile(s.each, 0.99));
      std::printf("%10.3f ", gb_per_s(o.scenes[i], x, us));
      if (s.ratios.empty())
        std::printf("%7s\n", "");
      else
        std::printf("%7.3f\n", bench::median(s.ratios));
    }
  }
}

nlohmann::ordered_json to_json(const outcome& o, const std::vector<bench::bar>& bars) {
  nlohmann::ordered_json result{{"machine", o.machine}};
  for (std::size_t i = 0; i < o.cells.size(); ++i) {
    auto& x = o.cells[i];
    auto& where = o.scenes[i];
    for (auto& s : x.results) {
      const auto us = bench::median(s.rounds);
      nlohmann::ordered_json row{{"pattern", to_string(where.who)},
                                 {"memory", to_string(where.memory)},
                                 {"staged", where.staged},
                                 {"size_bytes", x.size_bytes},
                                 {"window", x.window},
                                 {"mode", s.name},
                                 {"operations_per_round", x.operations},
                                 {"median_us", us},
                                 {"gb_per_s", gb_per_s(where, x, us)}};
      if (!s.each.empty())
        row["p99_us"] = bench::quantile(s.each, 0.99);
      if (!s.ratios.empty())
        row["ratio"] = bench::median(s.ratios);
      row["round_medians_us"] = s.rounds;
      row["round_ratios"] = s.ratios;
      result["copies"].push_back(std::move(row));
    }
  }
  result["bars"] = bench::to_json(bars);
  return result;
}

// -- the whole

/// Returns true if every limit is met.
bool run(settings& s, caf::actor_system& sys, setting& all, bench::watchdog& guard,
         const std::vector<std::string>& library_options) {
  const auto start = std::chrono::steady_clock::now();
  guard.enter("opening the devices");
  const auto list = must(troupe::list_devices(sys));
  all.cuda = list.backend == "cuda";
  if (s.devices.empty())
    s.devices = list.ordinals;
  if (s.devices.size() < 2)
    bench::fail("copies between devices need two of them");
  if (s.max_bytes == 0)
    s.max_bytes = !all.cuda ? 64 * kib : s.quick ? 64 * mib : gib;
  for (const int x : s.devices)
    all.devices.push_back(must(troupe::device::open(sys, x)));

  outcome result;
  result.machine = bench::describe_machine(all.devices);
  result.machine["backend"] = list.backend;
  result.machine["library_options"] = library_options;
  result.machine["rounds"] = s.rounds;
  result.machine["segment_ms"] = s.segment_ms;
  std::printf("copies between %zu devices, backend %s%s\n%s\n", s.devices.size(),
              list.backend.c_str(), list.reason.empty() ? "" : (" (" + list.reason + ")").c_str(),
              bench::summary(result.machine).c_str());
  guard.enter("taking memory");
  all.routes = bench::routes_between(s.devices);
  all.plain = plain_memory_for(all.cuda, all.routes, s.buffer_bytes());
  all.plain_refs = bench::adopt_for(all.plain, all.devices, s.buffer_bytes());
  all.pool_refs = bench::allocate_for(all.routes, all.devices, s.buffer_bytes());
  run_staged(s, all, sys, guard, result); // first: access stays once it is enabled
  run_direct(s, all, sys, guard, result);

  guard.enter("the report");
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
  result.machine["seconds"] = time.count();
  const auto bars = bars_of(result, s.devices.size());
  print_table(result);
  bench::print_bars(bars);
  std::printf("%.0f s, every byte right\n", time.count());
  bench::write_json(s.json_file, to_json(result, bars));
  guard.enter("shutting down");
  return s.pass(bars);
}

} // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  settings s;
  CLI::App app{"Copies between devices through troupe beside the same ones by CUDA alone"};
  s.add_to(app);
  s.add_devices_to(app);
  app.add_option("--min", s.min_bytes, "smallest size, in bytes of a copy")->capture_default_str();
  app.add_option("--max", s.max_bytes,
                 "largest size; by default 1 GiB on GPUs (--quick: 64 MiB), 64 KiB without")
      ->check(CLI::Range(4 * kib, gib));
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
  by_default(s.time_limit_s, 400, 120);

  bench::watchdog guard{std::chrono::seconds{s.time_limit_s}};
  troupe::config cfg;
  auto library_options = app.remaining();
  library_options.push_back("--troupe.backend=" + s.backend);
  must(cfg.parse(library_options));
  if (cfg.help_printed())
    return 0;
  std::vector<bench::route_memory> plain; // outlives the lanes, which must not free it
  bool passed = false;
  {
    caf::actor_system sys{cfg};
    setting all;
    passed = run(s, sys, all, guard, library_options);
    plain = all.plain;
  }
  return passed ? 0 : 1;
}
