// Measures how fast a world recovers after a stall: by NCCL with and without a standby
// communicator, and with direct collectives, where operations wait behind the one that stalls.
// Compares with init and connecting alone, in one run and in turns. A rank that is never issued
// causes each stall. Also measures how fast a direct world opens. Sums are checked by value before
// times count. Also takes options of the library and of CAF, such as --troupe.spin=0.

#include "machine.hpp"
#include "must.hpp"
#include "rank_threads.hpp"
#include "report.hpp"
#include "settings.hpp"
#include "statistics.hpp"
#include "watchdog.hpp"
#include <troupe/backend.hpp>
#include <troupe/testing/fault_plan.hpp>
#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <latch>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using namespace std::chrono_literals;

namespace {

using bench::must;

constexpr std::size_t count = 1024; ///< elements of a sum
constexpr double mib = 1 << 20;

struct settings : bench::common_settings {
  settings() { time_limit_s = 300; }

  std::size_t cycles = 10;
  std::size_t rounds = 2;
  std::size_t stall_limit_ms = 50;
  std::size_t direct_cycles = 100;
  std::size_t in_flight = 256; ///< operations of a direct world, with the one that stalls
  std::size_t host_devices = 8;
};

double milliseconds(bench::clock::duration x) { return bench::microseconds(x) / 1e3; }

std::shared_ptr<troupe::backend> make_backend(const settings& s) {
  if (s.backend != "host") {
    auto cuda = troupe::make_cuda_backend();
    if (cuda || s.backend == "cuda")
      return must(std::move(cuda));
  }
  return troupe::make_host_backend({.devices = static_cast<int>(s.host_devices)});
}

/// The results of one kind of world. @units ms
struct series {
  troupe::standby_policy standby = troupe::standby_policy::none;
  troupe::collectives_policy collectives = troupe::collectives_policy::nccl;
  std::size_t in_flight = 1;
  std::size_t cycles = 0;
  std::vector<double> late_reports =
      {}; ///< from the stall limit, which begins at the request, to its error
  std::vector<double> recoveries =
      {}; ///< from there to the answer of the first sum in the next epoch
  std::vector<double> both = {};
  std::vector<double> lost_bytes = {}; ///< of the device that lost most, over all cycles of a round
};

// -- by hand

/// Devices with a stream and a thread each, as in a program without the library.
class hand_driven {
public:
  hand_driven(troupe::backend& on, const std::vector<int>& devices) : backend_(on) {
    for (std::size_t i = 0; i < devices.size(); ++i) {
      ranks_.push_back({static_cast<int>(i), devices[i]});
      devices_.push_back(must(on.open(devices[i])));
    }
    each_rank([&](std::size_t i) { streams_[i] = must(devices_[i]->create_stream()); });
  }
  ~hand_driven() {
    each_rank([&](std::size_t i) { must(devices_[i]->destroy_stream(streams_[i])); });
  }
  hand_driven(const hand_driven&) = delete;
  hand_driven& operator=(const hand_driven&) = delete;

  /// Returns the time of init and connecting with running threads. @units ms
  double make_communicator() {
    troupe::communicator_ranks built;
    std::latch go{1};
    std::latch ready{static_cast<std::ptrdiff_t>(ranks_.size())};
    bench::clock::time_point begin;
    bench::clock::time_point end;
    std::thread builder{[&] {
      ready.wait();
      begin = bench::clock::now();
      auto id = must(backend_.make_communicator_id());
      built = must(backend_.build(id, static_cast<int>(ranks_.size()), ranks_));
      go.count_down();
    }};
    each_rank([&](std::size_t i) {
      ready.count_down();
      go.wait();
      must(built[i]->connect(streams_[i], troupe::connect_scope::everything));
    });
    end = bench::clock::now();
    builder.join();
    must(backend_.destroy(std::move(built)));
    return milliseconds(end - begin);
  }

private:
  template <class F> void each_rank(F f) {
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < ranks_.size(); ++i)
      threads.emplace_back([this, &f, i] {
        must(devices_[i]->bind());
        f(i);
      });
    for (auto& x : threads)
      x.join();
  }

  troupe::backend& backend_;
  std::vector<troupe::local_rank> ranks_;
  std::vector<std::unique_ptr<troupe::backend_device>> devices_;
  std::vector<troupe::stream_view> streams_ = std::vector<troupe::stream_view>(64);
};

// -- through the library

using floats = std::vector<troupe::gpu_ref<float>>;

void fill(const troupe::world& world, const floats& refs, float value) {
  for (std::size_t i = 0; i < refs.size(); ++i)
    must(world.device_of(i).fill(refs[i], value).wait());
}

void check(const troupe::world& world, const floats& refs) {
  for (std::size_t i = 0; i < refs.size(); ++i)
    for (auto x : must(world.device_of(i).download(refs[i])))
      if (x != static_cast<float>(world.size()))
        bench::fail("a wrong sum on rank " + std::to_string(i));
}

std::vector<double> free_bytes(const troupe::world& world) {
  std::vector<double> result;
  for (std::size_t i = 0; i < world.size(); ++i)
    result.push_back(static_cast<double>(must(world.device_of(i).stats().wait()).free_bytes));
  return result;
}

/// Blocks until the world is ready, with a standby if it has them.
class readiness {
public:
  readiness(caf::actor_system& sys, const troupe::world& world, bool with_standby)
      : self_(sys), with_standby_(with_standby) {
    troupe::tell(self_, world.actor(), troupe::subscribe{});
  }

  void wait_for(std::uint64_t epoch) {
    while (now_.phase != troupe::world_phase::ready || now_.epoch < epoch ||
           (with_standby_ && !now_.standby_ready)) {
      self_->receive([&](const troupe::world_status& x) { now_ = x; });
      if (now_.phase == troupe::world_phase::failed)
        bench::fail(troupe::describe(now_.reason));
    }
  }

private:
  caf::scoped_actor self_;
  bool with_standby_;
  troupe::world_status now_;
};

void run_world(const settings& s, caf::actor_system& sys, troupe::testing::fault_plan& plan,
               series& to) {
  troupe::world_config config;
  config.devices = s.devices;
  config.collectives = to.collectives;
  config.limits.standby = to.standby;
  config.limits.stall_limit = std::chrono::milliseconds{s.stall_limit_ms};
  config.limits.restarts = 1 << 30;
  config.limits.restart_backoff = 0ms;
  auto world = must(troupe::world::open(sys, config));
  readiness ready{sys, world,
                  to.standby != troupe::standby_policy::none ||
                      to.collectives == troupe::collectives_policy::direct};
  auto hung = must(world.allocate<float>(count));
  auto next = must(world.allocate<float>(count));
  std::vector<double> before;
  for (std::size_t i = 0; i <= to.cycles; ++i) {
    ready.wait_for(world.status().epoch);
    if (i == 1) // after the first stall has allocated its resources
      before = free_bytes(world);
    fill(world, hung, 1); // waits until the old communicator has released its buffers
    fill(world, next, 1);
    plan.add(
        {troupe::testing::fault::not_issued, troupe::testing::verb::collective, s.devices.back()});
    const auto begin = bench::clock::now();
    auto first = world.all_reduce(hung);
    std::vector<troupe::pending<troupe::collective_done>> behind;
    while (behind.size() + 1 < to.in_flight)
      behind.push_back(world.all_reduce(hung));
    auto failed = first.wait();
    const auto told = bench::clock::now();
    if (troupe::code_of(failed ? caf::error{} : failed.error()) != troupe::errc::stalled)
      bench::fail("no stall, but " + (failed ? "success" : troupe::describe(failed.error())));
    auto done = world.all_reduce(next).wait();
    const auto end = bench::clock::now();
    must(done ? caf::error{} : done.error());
    check(world, next);
    for (auto& x : behind)
      if (x.wait())
        bench::fail("a sum behind the one that stalled has succeeded");
    if (i == 0)
      continue; // the first cycle only warms up
    to.late_reports.push_back(milliseconds(told - begin) - static_cast<double>(s.stall_limit_ms));
    to.recoveries.push_back(milliseconds(end - told));
    to.both.push_back(to.late_reports.back() + to.recoveries.back());
  }
  ready.wait_for(world.status().epoch);
  fill(world, hung, 1);
  const auto after = free_bytes(world);
  double most = 0;
  for (std::size_t i = 0; i < after.size(); ++i)
    most = std::max(most, before[i] - after[i]);
  to.lost_bytes.push_back(most);
}

/// Measures from the call of `world::open` to the answer of the first sum. `first`: a world on the
/// same devices, so that they are in use.
void open_worlds(const settings& s, caf::actor_system& sys, const troupe::world& first,
                 const troupe::world_config& config, std::vector<double>& to) {
  auto refs = must(first.allocate<float>(count));
  for (std::size_t i = 0; i <= s.direct_cycles; ++i) {
    fill(first, refs, 1);
    const auto begin = bench::clock::now();
    auto world = must(troupe::world::open(sys, config));
    auto done = world.all_reduce(refs).wait();
    const auto end = bench::clock::now();
    must(done ? caf::error{} : done.error());
    check(world, refs);
    if (i != 0) // the first one only warms up
      to.push_back(milliseconds(end - begin));
  }
}

// -- the report

nlohmann::ordered_json summary_of(const std::vector<double>& xs) {
  return {{"median", bench::median(xs)},
          {"p99", bench::quantile(xs, 0.99)},
          {"max", xs.empty() ? 0 : *std::max_element(xs.begin(), xs.end())},
          {"number", xs.size()},
          {"each", xs}};
}

void print_row(const char* name, const std::vector<double>& xs) {
  const auto x = summary_of(xs);
  std::printf("%-58s %9.3f %9.3f %9.3f\n", name, x["median"].get<double>(), x["p99"].get<double>(),
              x["max"].get<double>());
}

double largest(const std::vector<double>& xs) {
  return xs.empty() ? 0 : *std::max_element(xs.begin(), xs.end());
}

} // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  settings s;
  CLI::App app{"How fast a world goes on after a stall"};
  s.add_to(app);
  s.add_devices_to(app);
  app.add_option("--host-devices", s.host_devices, "virtual devices of the host backend")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--cycles", s.cycles, "stalls of each kind in a round")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--rounds", s.rounds, "rounds, in each of which all kinds have their turn")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--direct-cycles", s.direct_cycles,
                 "stalls of a direct world, and worlds opened, in a round")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--in-flight", s.in_flight, "operations of a direct world, with one that stalls")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--stall-limit-ms", s.stall_limit_ms, "the worlds' stall limit")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);

  bench::watchdog guard{std::chrono::seconds{s.time_limit_s}};
  troupe::set_log_sink([](const troupe::log_line& x) { // hide warnings: all these ends are intended
    if (x.level == troupe::log_level::error)
      std::fprintf(stderr, "%.*s%s\n", static_cast<int>(x.text.size()), x.text.data(),
                   x.why != nullptr ? (": " + to_string(*x.why)).c_str() : "");
  });
  auto executes = make_backend(s);
  if (s.devices.empty()) {
    s.devices.resize(static_cast<std::size_t>(executes->device_count()));
    std::iota(s.devices.begin(), s.devices.end(), 0);
  }
  std::vector<double> by_hand;
  std::vector<double> opened;
  series with{.standby = troupe::standby_policy::communicators, .cycles = s.cycles};
  series without{.cycles = s.cycles};
  series direct{.collectives = troupe::collectives_policy::direct,
                .in_flight = s.in_flight,
                .cycles = s.direct_cycles};
  const bool can_be_direct = executes->can_be_direct(s.devices);
  nlohmann::ordered_json machine;
  for (std::size_t round = 0; round < s.rounds; ++round) {
    guard.enter("communicators by hand");
    {
      hand_driven hand{*executes, s.devices};
      hand.make_communicator(); // the first one of a process takes longer
      for (std::size_t i = 0; i < s.cycles; ++i)
        by_hand.push_back(hand.make_communicator());
    }
    auto plan = std::make_shared<troupe::testing::fault_plan>();
    troupe::config cfg;
    if (auto error = cfg.parse(app.remaining()))
      bench::fail(troupe::describe(error));
    if (cfg.help_printed())
      return 0;
    cfg.use_backend(troupe::testing::with_faults(executes, plan));
    caf::actor_system sys{cfg};
    if (round == 0) {
      guard.enter("opening a world");
      const auto way = can_be_direct ? troupe::collectives_policy::direct // no NCCL ends meanwhile
                                     : troupe::collectives_policy::nccl;
      machine = bench::describe_machine(
          must(troupe::world::open(sys, {.devices = s.devices, .collectives = way})));
      machine["backend"] = std::string{executes->name()};
      machine["ranks"] = s.devices.size();
      machine["stall_limit_ms"] = s.stall_limit_ms;
      machine["cycles"] = s.cycles;
      machine["rounds"] = s.rounds;
      std::printf("stalls of an all-reduce, %zu ranks, backend %s, limit %zu ms\n%s\n",
                  s.devices.size(), std::string{executes->name()}.c_str(), s.stall_limit_ms,
                  bench::summary(machine).c_str());
    }
    if (can_be_direct) { // first: NCCL's communicators still end while the next world runs
      // Keeps the devices open: closing one frees pinned memory, for which its launches wait.
      const troupe::world_config config{.devices = s.devices, .collectives = direct.collectives};
      const auto in_use = must(troupe::world::open(sys, config));
      guard.enter("stalls of direct collectives");
      run_world(s, sys, *plan, direct);
      guard.enter("opening direct worlds");
      open_worlds(s, sys, in_use, config, opened);
    }
    guard.enter("stalls with a standby");
    run_world(s, sys, *plan, with);
    guard.enter("stalls without a standby");
    run_world(s, sys, *plan, without);
  }

  guard.enter("the report");
  std::printf("\n%-58s %9s %9s %9s\n", "ms", "median", "p99", "max");
  auto late = with.late_reports;
  late.insert(late.end(), without.late_reports.begin(), without.late_reports.end());
  print_row("stall limit to report", late);
  print_row("report to the next right sum, with a standby", with.recoveries);
  print_row("report to the next right sum, without", without.recoveries);
  print_row("init and connecting everything, by hand", by_hand);
  if (can_be_direct) {
    const auto behind = " direct, " + std::to_string(s.in_flight) + " in flight";
    print_row(("stall limit to report," + behind).c_str(), direct.late_reports);
    print_row(("report to the next right sum," + behind).c_str(), direct.recoveries);
    print_row("open to the first right sum, direct", opened);
  } else {
    std::printf("the devices cannot have direct collectives\n");
  }
  std::printf(
      "\nfree device memory less after the cycles than after the first, at most: %.1f MiB\n\n",
      std::max(largest(with.lost_bytes), largest(direct.lost_bytes)) / mib);
  std::vector<bench::bar> bars{
      {"report after the stall limit, p99, ms", 5, true, bench::quantile(late, 0.99)},
      {"next right sum with a standby, p99, ms", 10, true, bench::quantile(with.recoveries, 0.99)},
      {"without, median, time to init and connect by hand", 1.3, true,
       bench::median(without.recoveries) / bench::median(by_hand)},
  };
  if (can_be_direct) {
    bars.push_back({"direct: from the stall limit to the next right sum, p99, ms", 6, true,
                    bench::quantile(direct.both, 0.99)});
    bars.push_back({"direct: from the report to the next right sum, p99, ms", 1, true,
                    bench::quantile(direct.recoveries, 0.99)});
    bars.push_back({"direct: open to the first right sum, max, ms", 20, true, largest(opened)});
  }
  bench::print_bars(bars);
  nlohmann::ordered_json json{{"machine", machine}};
  json["ms"] = {{"limit_to_report", summary_of(late)},
                {"report_to_sum_with_standby", summary_of(with.recoveries)},
                {"report_to_sum_without", summary_of(without.recoveries)},
                {"limit_to_report_direct", summary_of(direct.late_reports)},
                {"report_to_sum_direct", summary_of(direct.recoveries)},
                {"open_to_sum_direct", summary_of(opened)},
                {"by_hand", summary_of(by_hand)}};
  json["lost_device_bytes"] = {{"with_standby", with.lost_bytes},
                               {"without", without.lost_bytes},
                               {"direct", direct.lost_bytes}};
  json["bars"] = bench::to_json(bars);
  bench::write_json(s.json_file, json);
  guard.enter("shutting down");
  return s.pass(bars) ? 0 : 1;
}
