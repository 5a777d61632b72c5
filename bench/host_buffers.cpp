// Compares a sum over host memory (mesh_comm) with each of its steps alone, in one run and in
// turns. A sum moves as much up as down at the same time. So its steps are PCIe in both directions,
// the collective and, for pageable memory, the host copies in and out. Sums are checked by value
// before times count. Also takes options of the library and of CAF, such as --troupe.spin=0.

#include "machine.hpp"
#include "must.hpp"
#include "rank_threads.hpp"
#include "report.hpp"
#include "settings.hpp"
#include "statistics.hpp"
#include "watchdog.hpp"
#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using bench::must;

constexpr std::size_t mib = std::size_t{1} << 20;

struct settings : bench::common_settings {
  settings() { time_limit_s = 180; }

  std::size_t size_mib = 256;
  std::size_t rounds = 5;
  std::size_t chunk_kib = 0;
  std::size_t chunks = 0;
};

/// The sums that have a step: of any memory, of pageable memory only, or none, for half a step.
enum class needed_by : std::uint8_t { both, pageable, none };

struct step {
  const char* name;
  needed_by who;
  std::function<void()> run;
  std::vector<double> times; ///< @units ms
};

template <class F> double milliseconds(F f) {
  const auto begin = bench::clock::now();
  f();
  return bench::microseconds(bench::clock::now() - begin) / 1e3;
}

/// The memory of all ranks, with the steps and the sums over it.
class workload {
public:
  workload(const troupe::world& world, const troupe::mesh_config& config, std::size_t size_bytes)
      : world_(world), config_(config), mesh_(must(troupe::mesh_comm::open(world, config))),
        device_memory_(must(world.allocate<float>(size_bytes / sizeof(float), true))) {
    for (std::size_t i = 0; i < ranks(); ++i) {
      pinned_.push_back(must(mesh_[i].where().allocate_pinned(size_bytes)));
      pageable_.emplace_back(size_bytes);
      const auto ring = std::min(config.chunks * config.chunk_bytes, size_bytes);
      ring_up_.push_back(must(mesh_[i].where().allocate_pinned(ring)));
      ring_down_.push_back(must(mesh_[i].where().allocate_pinned(ring)));
    }
  }

  std::size_t ranks() const { return mesh_.size(); }

  std::vector<step> steps() {
    const auto each = [this](auto ask) { return [this, ask] { each_rank(ask); }; };
    return {
        {"up, pinned memory",
         needed_by::none,
         each([this](std::size_t i) {
           return mesh_[i].where().upload(device_memory_[i], pinned_[i]);
         }),
         {}},
        {"down, pinned memory",
         needed_by::none,
         each([this](std::size_t i) {
           return mesh_[i].where().download(device_memory_[i], pinned_[i]);
         }),
         {}},
        {"up and down at a time, pinned memory", needed_by::both, [this] { move_both_ways(); }, {}},
        {"all-reduce, device memory",
         needed_by::both,
         [this] { must(world_.all_reduce(device_memory_).wait()); },
         {}},
        {"host copy into chunks", needed_by::none, [this] { copy_in_chunks(true, false); }, {}},
        {"host copy out of chunks", needed_by::none, [this] { copy_in_chunks(false, true); }, {}},
        {"host copies in and out at a time",
         needed_by::pageable,
         [this] { copy_in_chunks(true, true); },
         {}},
    };
  }

  void sum_pinned() {
    each_rank(
        [this](std::size_t i) { return mesh_[i].all_reduce(pinned_[i], troupe::dtype::float32); });
  }
  void sum_pageable() {
    each_rank([this](std::size_t i) {
      return mesh_[i].all_reduce(pageable_[i].writable(), troupe::dtype::float32);
    });
  }

  /// Sets element k of rank i to i + k mod 1000, so that sums of few ranks are exact.
  void fill() {
    threads([this](std::size_t i) {
      for (auto* memory : {&pinned_[i], &pageable_[i]}) {
        auto numbers = memory->as<float>();
        for (std::size_t k = 0; k < numbers.size(); ++k)
          numbers[k] = static_cast<float>(i + k % 1000);
      }
    });
  }
  void check(bool pinned) {
    threads([&](std::size_t i) {
      const auto n = ranks();
      const auto numbers = (pinned ? pinned_ : pageable_)[i].as<float>();
      for (std::size_t k = 0; k < numbers.size(); ++k)
        if (numbers[k] != static_cast<float>(n * (n - 1) / 2 + n * (k % 1000)))
          bench::fail("a wrong sum on rank " + std::to_string(i) + ", element " +
                      std::to_string(k));
    });
  }

private:
  template <class F> void each_rank(F ask) {
    std::vector<troupe::pending<void>> answers;
    for (std::size_t i = 0; i < ranks(); ++i)
      answers.push_back(ask(i));
    for (auto& x : answers)
      must(x.wait());
  }
  template <class F> void threads(F f) {
    std::vector<std::thread> all;
    for (std::size_t i = 0; i < ranks(); ++i)
      all.emplace_back([&f, i] { f(i); });
    for (auto& x : all)
      x.join();
  }
  /// Moves as much up as down. Uses halves, since both directions use one buffer.
  void move_both_ways() {
    std::vector<troupe::pending<void>> answers;
    const auto half = device_memory_[0].count() / 2;
    for (bool first : {true, false})
      for (std::size_t i = 0; i < ranks(); ++i) {
        const auto part = [&](bool front) {
          return std::pair{
              must(device_memory_[i].slice(front ? 0 : half, half)),
              must(pinned_[i].slice(front ? 0 : half * sizeof(float), half * sizeof(float)))};
        };
        const auto [up, from] = part(first);
        const auto [down, to] = part(!first);
        answers.push_back(mesh_[i].where().upload(up, from));
        answers.push_back(mesh_[i].where().download(down, to));
      }
    for (auto& x : answers)
      must(x.wait());
  }
  /// Copies all of the memory with one thread per direction, at different places.
  void copy_in_chunks(bool in, bool out) {
    const auto go = [this](std::size_t i, bool up) {
      const auto ring = (up ? ring_up_ : ring_down_)[i].writable();
      const auto memory = pageable_[i].writable();
      const auto offset = up ? 0 : memory.size() / 2 / config_.chunk_bytes * config_.chunk_bytes;
      for (std::size_t k = 0; k < memory.size(); k += config_.chunk_bytes) {
        const auto at = (k + offset) % memory.size();
        const auto size = std::min(config_.chunk_bytes, memory.size() - at);
        const auto slot = ring.subspan(k % ring.size()).data();
        std::memcpy(up ? slot : memory.data() + at, up ? memory.data() + at : slot, size);
      }
    };
    threads([&](std::size_t i) {
      std::thread other;
      if (in && out)
        other = std::thread{[&] { go(i, true); }};
      go(i, in && !out);
      if (other.joinable())
        other.join();
    });
  }

  const troupe::world& world_;
  const troupe::mesh_config config_;
  std::vector<troupe::mesh_comm> mesh_;
  std::vector<troupe::gpu_ref<float>> device_memory_;
  std::vector<troupe::host_buffer> pinned_;
  std::vector<troupe::host_buffer> pageable_;
  std::vector<troupe::host_buffer> ring_up_; // as in the mesh, for pageable memory
  std::vector<troupe::host_buffer> ring_down_;
};

void run(const settings& s, const troupe::world& world, const std::string& backend,
         bench::watchdog& guard, std::vector<bench::bar>& bars) {
  const auto size_bytes = s.size_mib * mib;
  troupe::mesh_config config;
  if (s.chunk_kib != 0)
    config.chunk_bytes = s.chunk_kib << 10;
  if (s.chunks != 0)
    config.chunks = s.chunks;
  auto machine = bench::describe_machine(world);
  machine["backend"] = backend;
  machine["ranks"] = world.size();
  machine["size_bytes"] = size_bytes;
  machine["chunk_bytes"] = config.chunk_bytes;
  machine["chunks"] = config.chunks;
  machine["rounds"] = s.rounds;
  std::printf("sums of float32 over host memory, %zu MiB on each of %zu ranks, backend %s, "
              "%zu chunks of %zu KiB\n%s\n",
              s.size_mib, world.size(), backend.c_str(), config.chunks, config.chunk_bytes >> 10,
              bench::summary(machine).c_str());

  guard.enter("taking memory");
  workload load{world, config, size_bytes};
  auto steps = load.steps();
  std::vector<double> pinned;
  std::vector<double> pageable;
  for (std::size_t round = 0; round <= s.rounds; ++round) {
    const auto keep = [&](std::vector<double>& times, double time) {
      if (round != 0) // the first round only warms up
        times.push_back(time);
    };
    for (auto& x : steps) {
      guard.enter(x.name);
      keep(x.times, milliseconds(x.run));
    }
    load.fill();
    guard.enter("a sum over pinned memory");
    keep(pinned, milliseconds([&] { load.sum_pinned(); }));
    load.check(true);
    guard.enter("a sum over pageable memory");
    keep(pageable, milliseconds([&] { load.sum_pageable(); }));
    load.check(false);
  }

  guard.enter("the report");
  std::printf("\n%-40s %9s %9s\n", "", "ms", "GB/s");
  nlohmann::ordered_json rows;
  const auto row = [&](const char* name, const std::vector<double>& times) {
    const auto time = bench::median(times);
    const auto rate = static_cast<double>(size_bytes) / time / 1e6;
    std::printf("%-40s %9.2f %9.1f\n", name, time, rate);
    rows.push_back({{"what", name}, {"ms", time}, {"gb_per_s", rate}, {"each_ms", times}});
    return time;
  };
  double slowest = 0;
  double slowest_with_host = 0;
  for (auto& x : steps) {
    const auto time = row(x.name, x.times);
    if (x.who != needed_by::none)
      slowest_with_host = std::max(slowest_with_host, time);
    if (x.who == needed_by::both)
      slowest = std::max(slowest, time);
  }
  const auto whole_pinned = row("mesh_comm, pinned memory", pinned);
  const auto whole_pageable = row("mesh_comm, pageable memory", pageable);
  std::printf("\n");
  bars = {
      {"slowest step to the sum, pinned memory", 0.8, false, slowest / whole_pinned},
      {"slowest step to the sum, pageable memory", 0.8, false, slowest_with_host / whole_pageable}};
  bench::print_bars(bars);
  bench::write_json(s.json_file,
                    {{"machine", machine}, {"rows", rows}, {"bars", bench::to_json(bars)}});
}

} // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  settings s;
  CLI::App app{"A sum over host memory beside its steps"};
  s.add_to(app);
  s.add_devices_to(app);
  app.add_option("--size-mib", s.size_mib, "host memory of each rank")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--rounds", s.rounds)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--chunk-kib", s.chunk_kib, "by default the library's")
      ->check(CLI::PositiveNumber);
  app.add_option("--chunks", s.chunks, "by default the library's")->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);

  bench::watchdog guard{std::chrono::seconds{s.time_limit_s}};
  auto library_options = app.remaining();
  library_options.push_back("--troupe.backend=" + s.backend);
  troupe::config cfg;
  must(cfg.parse(library_options));
  if (cfg.help_printed())
    return 0;
  std::vector<bench::bar> bars;
  {
    caf::actor_system sys{cfg};
    guard.enter("opening the world");
    const auto list = must(troupe::list_devices(sys));
    const auto world =
        must(troupe::world::open(sys, {.devices = s.devices.empty() ? list.ordinals : s.devices}));
    run(s, world, list.backend, guard, bars);
    guard.enter("shutting down");
  }
  return s.pass(bars) ? 0 : 1;
}
