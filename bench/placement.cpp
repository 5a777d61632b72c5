// Measures the cost of worker processes: the same world and the same copies, with devices in this
// process and in workers, in one run and in turns. Every sum and byte is checked by value before
// times count. Also takes options of the library and of CAF, such as --troupe.spin=0.

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
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using bench::must;

constexpr std::size_t mib = std::size_t{1} << 20;

struct settings : bench::common_settings {
  settings() {
    backend = "cuda";
    time_limit_s = 240;
  }

  std::size_t rounds = 5;
  std::size_t segment_ms = 100;
  std::size_t max_bytes = 1024 * mib;
  std::size_t copy_mib = 256;
  std::uint32_t rank_local_sums = 20'000;
};

/// One actor system with its world.
struct contestant {
  contestant(const char* called, troupe::placement where, const settings& s,
             std::vector<std::string> options)
      : name(called) {
    options.push_back("--troupe.backend=" + s.backend);
    must(cfg.parse(options));
    if (cfg.help_printed())
      std::exit(EXIT_SUCCESS);
    cfg.placement = where;
    sys = std::make_unique<caf::actor_system>(cfg);
    auto devices = s.devices.empty() ? must(troupe::list_devices(*sys)).ordinals : s.devices;
    world.emplace(must(troupe::world::open(*sys, {.devices = std::move(devices)})));
  }

  const char* name;
  troupe::config cfg;
  std::unique_ptr<caf::actor_system> sys;
  std::optional<troupe::world> world;
};

struct row {
  std::string what;
  std::size_t size_bytes = 0;
  std::vector<double> in_process; ///< median of each round @units us
  std::vector<double> workers;

  double ratio() const { return bench::median(workers) / bench::median(in_process); }
};

/// Returns the median time of one call of `f` over a segment. @units us
double time_of(const std::function<void()>& f, std::size_t segment_ms) {
  std::vector<double> each;
  const auto end = bench::clock::now() + std::chrono::milliseconds{segment_ms};
  while (each.size() < 3 || bench::clock::now() < end) {
    const auto begin = bench::clock::now();
    f();
    each.push_back(bench::microseconds(bench::clock::now() - begin));
  }
  return bench::median(each);
}

/// Returns the time per sum of 8 bytes in one rank's loop, here or in its worker. @units us
double time_of_sums(const troupe::world_rank& rank, const troupe::gpu_ref<float>& ref,
                    std::uint32_t number) {
  must(rank.barrier().wait());
  const auto begin = bench::clock::now();
  for (std::uint32_t i = 0; i < number; ++i)
    must(rank.all_reduce(ref).wait());
  return bench::microseconds(bench::clock::now() - begin) / number;
}

/// Checks a sum of two elements, and then sets them to zeros, which stay zeros.
troupe::gpu_ref<float> checked_sum(const troupe::world_rank& rank) {
  auto device = rank.where();
  auto ref = must(device.allocate<float>(2));
  must(device.fill(ref, static_cast<float>(rank.index() + 1)).wait());
  must(rank.all_reduce(ref).wait());
  const auto n = rank.size();
  for (auto x : must(device.download(ref)))
    if (x != static_cast<float>(n * (n + 1) / 2))
      bench::fail("a wrong sum on rank " + std::to_string(rank.index()));
  must(device.fill(ref, 0.F).wait());
  return ref;
}

constexpr auto sums_of_ranks = "sums of ranks";

/// Starts an actor that reports its time for the number of sums in each message.
caf::actor begin_sums(const troupe::program_place& place) {
  return place.system.spawn([place](caf::blocking_actor* self) {
    auto ref = checked_sum(place.rank);
    for (bool more = true; more;)
      self->receive([&](const troupe::program_message& x) {
        std::uint32_t number = 0;
        std::memcpy(&number, x.bytes.data(), std::min(sizeof number, x.bytes.size()));
        more = number > 0;
        if (!more)
          return;
        const auto time = time_of_sums(place.rank, ref, number);
        std::vector<std::uint8_t> bytes(sizeof time);
        std::memcpy(bytes.data(), &time, sizeof time);
        if (place.report(std::move(bytes)))
          more = false;
      });
  });
}

/// Sums that each rank requests itself, by NCCL: threads of this process, and actors in the
/// workers.
class rank_local_sums {
public:
  rank_local_sums(contestant& here, contestant& there)
      : here_(must(troupe::world::open(*here.sys, config_for(*here.world)))), self_(*there.sys) {
    auto config = config_for(*there.world);
    config.program.name = sums_of_ranks;
    actor_ = must(troupe::spawn_nccl_world(*there.sys, config));
    troupe::tell(self_, actor_, troupe::subscribe{});
    in_threads([&](std::size_t i) { refs_[i] = checked_sum(here_.rank(i)); });
  }
  ~rank_local_sums() { caf::anon_send_exit(actor_, caf::exit_reason::user_shutdown); }

  /// Returns the time of the slowest rank. @units us
  double in_process(std::uint32_t number) {
    std::vector<double> times(here_.size());
    in_threads([&](std::size_t i) { times[i] = time_of_sums(here_.rank(i), refs_[i], number); });
    return *std::max_element(times.begin(), times.end());
  }
  double in_workers(std::uint32_t number) {
    std::vector<std::uint8_t> bytes(sizeof number);
    std::memcpy(bytes.data(), &number, sizeof number);
    troupe::tell(self_, actor_, troupe::program_message{-1, bytes});
    double slowest = 0;
    for (std::size_t reports = 0; reports < here_.size();)
      self_->receive(
          [&](const troupe::program_report& x) {
            double time = 0;
            std::memcpy(&time, x.bytes.data(), std::min(sizeof time, x.bytes.size()));
            slowest = std::max(slowest, time);
            ++reports;
          },
          [](const troupe::program_ended& x) {
            bench::fail("the program of rank " + std::to_string(x.rank) +
                        " ended: " + troupe::describe(x.why));
          },
          [](const troupe::world_status&) {});
    return slowest;
  }

private:
  static troupe::world_config config_for(const troupe::world& like) {
    troupe::world_config result;
    for (std::size_t i = 0; i < like.size(); ++i)
      result.devices.push_back(like.device_of(i).ordinal());
    result.name = "programs";
    result.collectives = troupe::collectives_policy::nccl;
    return result;
  }

  template <class F> void in_threads(F f) {
    refs_.resize(here_.size());
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < here_.size(); ++i)
      threads.emplace_back([&f, i] { f(i); });
    for (auto& x : threads)
      x.join();
  }

  const troupe::world here_;
  caf::scoped_actor self_;
  caf::actor actor_;
  std::vector<troupe::gpu_ref<float>> refs_;
};

/// The memory of one contestant, and the work on it.
class workload {
public:
  workload(contestant& of, std::size_t max_bytes, std::size_t copy_bytes)
      : world_(*of.world), device_(world_.device_of(0)), links_(links_of(world_)),
        refs_(must(world_.allocate<float>(max_bytes / sizeof(float), true))),
        target_(must(device_.allocate<std::uint8_t>(copy_bytes))),
        pinned_(must(device_.allocate_pinned(copy_bytes))), pageable_(copy_bytes) {}

  std::function<void()> sum(std::size_t size_bytes) {
    std::vector<troupe::gpu_ref<float>> parts;
    for (auto& x : refs_)
      parts.push_back(must(x.slice(0, size_bytes / sizeof(float))));
    for (std::size_t i = 0; i < parts.size(); ++i)
      must(world_.device_of(i).fill(parts[i], static_cast<float>(i + 1)).wait());
    must(world_.all_reduce(parts).wait());
    const auto n = parts.size();
    const auto want = static_cast<float>(n * (n + 1) / 2);
    for (std::size_t i = 0; i < n; ++i)
      for (auto x : must(world_.device_of(i).download(parts[i])))
        if (x != want)
          bench::fail("a wrong sum on rank " + std::to_string(i));
    for (std::size_t i = 0; i < n; ++i) // sums of zeros stay zeros
      must(world_.device_of(i).fill(parts[i], 0.F).wait());
    return [this, parts = std::move(parts)] { must(world_.all_reduce(parts).wait()); };
  }

  void check_copies() {
    for (auto* memory : {&pinned_, &pageable_}) {
      auto bytes = memory->as<std::uint8_t>();
      for (std::size_t i = 0; i < bytes.size(); ++i)
        bytes[i] = static_cast<std::uint8_t>(i * 31 + (i >> 12));
      must(device_.upload(target_, *memory).wait());
      std::fill(bytes.begin(), bytes.end(), std::uint8_t{0xa5});
      must(device_.download(target_, *memory).wait());
      for (std::size_t i = 0; i < bytes.size(); ++i)
        if (bytes[i] != static_cast<std::uint8_t>(i * 31 + (i >> 12)))
          bench::fail("a wrong byte after a copy");
    }
  }
  /// From the first device to the second.
  std::function<void()> copy(std::size_t size_bytes) {
    constexpr float content = 3;
    const auto source = must(refs_[0].slice(0, size_bytes / sizeof(float)));
    const auto target = must(refs_[1].slice(0, size_bytes / sizeof(float)));
    must(world_.device_of(0).fill(source, content).wait());
    must(world_.device_of(1).fill(target, content + 1).wait());
    must(links_.copy(target, source).wait());
    for (auto x : must(world_.device_of(1).download(target)))
      if (x != content)
        bench::fail("a wrong value after a copy between devices");
    return [this, source, target] { must(links_.copy(target, source).wait()); };
  }
  std::function<void()> up(bool pinned) {
    return [this, pinned] { must(device_.upload(target_, pinned ? pinned_ : pageable_).wait()); };
  }
  std::function<void()> down(bool pinned) {
    return [this, pinned] { must(device_.download(target_, pinned ? pinned_ : pageable_).wait()); };
  }

private:
  static troupe::topology links_of(const troupe::world& world) {
    std::vector<troupe::device> devices;
    for (std::size_t i = 0; i < world.size(); ++i)
      devices.push_back(world.device_of(i));
    return must(troupe::topology::open(devices));
  }

  const troupe::world& world_;
  troupe::device device_;
  const troupe::topology links_;
  std::vector<troupe::gpu_ref<float>> refs_;
  troupe::gpu_ref<std::uint8_t> target_;
  troupe::host_buffer pinned_;
  troupe::host_buffer pageable_;
};

void run(const settings& s, contestant& here, contestant& there, bench::watchdog& guard,
         std::vector<bench::bar>& bars) {
  auto machine = bench::describe_machine(*here.world);
  std::printf("devices in this process and in workers, %zu ranks, backend %s\n%s\n\n",
              here.world->size(), s.backend.c_str(), bench::summary(machine).c_str());
  const auto copy_bytes = s.copy_mib * mib;
  workload mine{here, s.max_bytes, copy_bytes};
  workload theirs{there, s.max_bytes, copy_bytes};
  guard.enter("copies, by value");
  mine.check_copies();
  theirs.check_copies();
  std::vector<row> rows;
  const auto compare = [&](std::string what, std::size_t size_bytes, auto make) {
    guard.enter(what);
    auto& x = rows.emplace_back(row{std::move(what), size_bytes, {}, {}});
    const std::function<void()> a = make(mine);
    const std::function<void()> b = make(theirs);
    for (std::size_t round = 0; round <= s.rounds; ++round) {
      const auto first = time_of(a, s.segment_ms);
      const auto second = time_of(b, s.segment_ms);
      if (round == 0)
        continue; // the first round only warms up
      x.in_process.push_back(first);
      x.workers.push_back(second);
    }
    std::printf("%-32s %12zu %12.1f %12.1f %8.3f\n", x.what.c_str(), size_bytes,
                bench::median(x.in_process), bench::median(x.workers), x.ratio());
    return x.ratio();
  };
  std::printf("%-32s %12s %12s %12s %8s\n", "", "bytes", "here, us", "workers, us", "ratio");
  std::optional<double> small;
  double large = 0;
  for (std::size_t size :
       {std::size_t{8}, std::size_t{4096}, mib, 64 * mib, 256 * mib, 1024 * mib}) {
    if (size > s.max_bytes)
      continue;
    const auto ratio = compare("all_reduce", size, [size](workload& x) { return x.sum(size); });
    if (size == 8)
      small = ratio;
    if (size >= 64 * mib)
      large = std::max(large, ratio);
  }
  guard.enter("sums of 8 bytes, asked for by each rank");
  std::optional<double> rank_local;
  {
    rank_local_sums sums{here, there};
    auto& x = rows.emplace_back(row{"all_reduce, rank-local", 8, {}, {}});
    for (std::size_t round = 0; round <= s.rounds; ++round) {
      const auto first = sums.in_process(s.rank_local_sums);
      const auto second = sums.in_workers(s.rank_local_sums);
      if (round == 0)
        continue;
      x.in_process.push_back(first);
      x.workers.push_back(second);
    }
    std::printf("%-32s %12zu %12.1f %12.1f %8.3f\n", x.what.c_str(), x.size_bytes,
                bench::median(x.in_process), bench::median(x.workers), x.ratio());
    rank_local = x.ratio();
  }
  for (const auto size : {std::size_t{4096}, mib, 64 * mib, 1024 * mib})
    if (size <= s.max_bytes && here.world->size() > 1)
      compare("copy to another device", size, [=](workload& x) { return x.copy(size); });
  const auto largest_copy = rows.back().ratio(); // to another device, if there is one
  double copies = 0;
  for (bool pinned : {true, false}) {
    const std::string memory = pinned ? "pinned" : "pageable";
    copies = std::max(copies, compare("upload, " + memory, copy_bytes,
                                      [=](workload& x) { return x.up(pinned); }));
    copies = std::max(copies, compare("download, " + memory, copy_bytes,
                                      [=](workload& x) { return x.down(pinned); }));
  }
  std::printf("\n");
  bars = {{"8 B, from the parent, time to in-process", 1.15, true, small},
          {"8 B, rank-local in the workers, time to in-process", 1.2, true, rank_local},
          {"64 MiB and more, bus bandwidth to in-process", 0.98, false,
           large > 0 ? std::optional{1 / large} : std::nullopt},
          {"upload and download, bandwidth to in-process", 0.9, false, 1 / copies}};
  if (here.world->size() > 1)
    bars.push_back({"1 GiB to another device, bandwidth to in-process", 0.97, false,
                    s.max_bytes >= 1024 * mib ? std::optional{1 / largest_copy} : std::nullopt});
  bench::print_bars(bars);
  nlohmann::ordered_json json{{"machine", machine}};
  for (auto& x : rows)
    json["rows"].push_back({{"what", x.what},
                            {"size_bytes", x.size_bytes},
                            {"in_process_us", bench::median(x.in_process)},
                            {"workers_us", bench::median(x.workers)},
                            {"ratio", x.ratio()}});
  json["bars"] = bench::to_json(bars);
  bench::write_json(s.json_file, json);
}

} // namespace

int main(int argc, char** argv) {
  must(troupe::register_program(sums_of_ranks, begin_sums));
  if (auto status = troupe::worker_main(argc, argv))
    return *status;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  settings s;
  CLI::App app{"What worker processes cost"};
  s.add_to(app);
  s.add_devices_to(app);
  app.add_option("--rounds", s.rounds)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--segment-ms", s.segment_ms, "how long each runs at a time")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--max", s.max_bytes, "largest sum, in bytes")->capture_default_str();
  app.add_option("--copy-mib", s.copy_mib)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--rank-local-sums", s.rank_local_sums, "per round")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);

  bench::watchdog guard{std::chrono::seconds{s.time_limit_s}};
  std::vector<bench::bar> bars;
  {
    guard.enter("opening the worlds");
    contestant there{"workers", troupe::placement::worker_process, s, app.remaining()};
    contestant here{"in-process", troupe::placement::in_process, s, app.remaining()};
    run(s, here, there, guard, bars);
    guard.enter("shutting down");
  }
  return s.pass(bars) ? 0 : 1;
}
