// How fast a world goes on when a worker process is killed, or a kernel in it faults, under load:
// from the request that does it to the first answer that tells of it, to the first right sum of all
// ranks, with the spare in the dead one's place, and until the next one could come. Every sum is
// checked by value. Options of the library and of CAF are understood too.

#include "machine.hpp"
#include "must.hpp"
#include "rank_threads.hpp"
#include "report.hpp"
#include "statistics.hpp"
#include "watchdog.hpp"
#include <troupe/troupe.hpp>

#if TROUPE_HAS_CUDA
#include "support/faulty_kernels.hpp"
#endif

#include <caf/all.hpp>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using bench::must;
using namespace std::chrono_literals;

struct settings {
  std::vector<int> devices;
  std::size_t kills = 20;
  std::size_t elements = 1024;
  std::size_t time_limit_s = 300;
  std::string backend = "cuda";
  std::string how = "kill";
  std::string json_file;
  bool check = false;
};

/// What ends a worker: the names of the launches that do it.
std::vector<std::string> register_ends() {
  std::vector<std::string> names{"kill"};
  must(troupe::register_launch(names.back(), [](troupe::launch_context&, auto, auto, auto) {
    std::raise(SIGKILL);
    return caf::error{};
  }));
#if TROUPE_HAS_CUDA
  using troupe::testing::kernel_fault;
  for (auto [name, fault] :
       {std::pair{"illegal_address", kernel_fault::illegal_address},
        std::pair{"trap", kernel_fault::trap}, std::pair{"assertion", kernel_fault::assertion}}) {
    names.emplace_back(name);
    must(troupe::register_launch(
        name, [fault = fault](troupe::launch_context& context, auto, auto, auto) {
          return troupe::testing::launch_faulty(fault, context.cuda_stream()) == 0
                     ? caf::error{}
                     : troupe::make_error(troupe::errc::cuda_error, "the kernel was not launched");
        }));
  }
#endif
  return names;
}

double milliseconds(bench::clock::duration x) { return bench::microseconds(x) / 1e3; }

/// A client that sums without a pause, and goes on as soon as it can.
class client {
public:
  client(const troupe::world& over, std::size_t elements)
      : world_(over), elements_(elements), refs_(must(over.allocate<float>(elements))) {}

  void run() {
    while (!stop_) {
      if (!sum())
        recover();
    }
  }
  void stop() { stop_ = true; }

  struct loss {
    bench::clock::time_point told;  ///< the first answer with an error
    bench::clock::time_point right; ///< the answer of the first sum that was right
  };
  /// Waits for the loss number `n`, from 1 on, to be over.
  loss wait_loss(std::size_t n) {
    std::unique_lock lock{mutex_};
    condition_.wait(lock, [&] { return losses_.size() >= n; });
    return losses_[n - 1];
  }
  std::uint64_t sums() const { return sums_; }

private:
  bool sum() {
    const auto n = world_.size();
    for (std::size_t i = 0; i < n; ++i)
      if (!world_.device_of(i).fill(refs_[i], static_cast<float>(i + 1)).wait())
        return false;
    if (!world_.all_reduce(refs_).wait())
      return false;
    answered_ = bench::clock::now();
    const auto want = static_cast<float>(n * (n + 1) / 2);
    for (std::size_t i = 0; i < n; ++i) {
      auto got = world_.device_of(i).download(refs_[i]);
      if (!got)
        return false;
      for (auto x : *got)
        if (x != want)
          bench::fail("a wrong sum on rank " + std::to_string(i));
    }
    ++sums_;
    return true;
  }
  void recover() {
    loss x;
    x.told = bench::clock::now();
    do {
      for (std::size_t i = 0; i < refs_.size(); ++i)
        if (refs_[i].stale())
          if (auto fresh = world_.device_of(i).allocate<float>(elements_))
            refs_[i] = std::move(*fresh);
    } while (!stop_ && !sum());
    x.right = answered_;
    std::lock_guard lock{mutex_};
    losses_.push_back(x);
    condition_.notify_all();
  }

  const troupe::world& world_;
  const std::size_t elements_;
  std::vector<troupe::gpu_ref<float>> refs_;
  std::atomic<bool> stop_ = false;
  std::atomic<std::uint64_t> sums_ = 0;
  bench::clock::time_point answered_;
  std::mutex mutex_;
  std::condition_variable condition_;
  std::vector<loss> losses_;
};

void run(const settings& s, caf::actor_system& sys, const troupe::world& world,
         bench::watchdog& guard, std::vector<bench::bar>& bars) {
  auto machine = bench::describe_machine(world);
  machine["how"] = s.how;
  std::printf("ends of workers under load (%s), %zu ranks, backend %s\n%s\n\n", s.how.c_str(),
              world.size(), s.backend.c_str(), bench::summary(machine).c_str());
  caf::scoped_actor self{sys};
  troupe::detail::send(self, world.actor(), troupe::subscribe{});
  const auto wait_ready = [&] {
    bool ready = false;
    while (!ready)
      self->receive([&](const troupe::world_status& x) {
        if (x.phase == troupe::world_phase::failed)
          bench::fail("the world failed: " + troupe::describe(x.reason));
        ready = x.phase == troupe::world_phase::ready && x.standby_ready;
      });
  };
  client load{world, s.elements};
  std::thread thread{[&] { load.run(); }};
  std::mt19937 random{1};
  std::vector<double> told;
  std::vector<double> right;
  std::vector<double> ready;
  auto since = bench::clock::now();
  for (std::size_t i = 1; i <= s.kills; ++i) {
    guard.enter("waiting for the standbys, kill " + std::to_string(i));
    wait_ready();
    ready.push_back(milliseconds(bench::clock::now() - since));
    for (const auto from = load.sums(); load.sums() < from + 10;)
      std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::microseconds{random() % 20'000});
    const auto device = world.device_of(random() % world.size());
    guard.enter("a kill");
    const auto begin = bench::clock::now();
    device.launch(s.how, {}, {}, {}); // nobody waits for it
    const auto x = load.wait_loss(i);
    since = bench::clock::now();
    told.push_back(milliseconds(x.told - begin));
    right.push_back(milliseconds(x.right - begin));
  }
  load.stop();
  thread.join();
  guard.enter("the report");
  std::printf("%-48s %9s %9s %9s\n", "ms", "median", "p99", "max");
  nlohmann::ordered_json rows;
  const auto row = [&](const char* what, const std::vector<double>& times) {
    std::printf("%-48s %9.2f %9.2f %9.2f\n", what, bench::median(times),
                bench::quantile(times, 0.99), bench::quantile(times, 1));
    rows.push_back({{"what", what}, {"median_ms", bench::median(times)}, {"each_ms", times}});
  };
  row("from the kill to the first answer that tells", told);
  row("from the kill to the first right sum", right);
  row("from there until the next standbys are ready", ready);
  std::printf("%zu kills, %llu right sums\n\n", s.kills,
              static_cast<unsigned long long>(load.sums()));
  bars = {{"from the kill to the first right sum, median, ms", 3, true, bench::median(right)},
          {"the same, p99, ms", 10, true, bench::quantile(right, 0.99)}};
  bench::print_bars(bars);
  if (s.json_file.empty())
    return;
  const nlohmann::ordered_json json{
      {"machine", machine}, {"rows", rows}, {"bars", bench::to_json(bars)}};
  std::ofstream out{s.json_file};
  out << json.dump(2) << '\n';
  if (!out.flush())
    bench::fail("cannot write " + s.json_file);
}

} // namespace

int main(int argc, char** argv) {
  const auto ends = register_ends();
  if (auto status = troupe::worker_main(argc, argv))
    return *status;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  settings s;
  CLI::App app{"How fast a world goes on when a worker process is killed"};
  app.add_option("--backend", s.backend, "cuda or host")->capture_default_str();
  app.add_option("--devices", s.devices, "ordinals, such as 0,1; all by default")->delimiter(',');
  app.add_option("--kills", s.kills)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--how", s.how, "what ends the workers")
      ->check(CLI::IsMember(ends))
      ->capture_default_str();
  app.add_option("--elements", s.elements)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--time-limit", s.time_limit_s, "in seconds: what is not done then hangs")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--json", s.json_file, "file to write the results to");
  app.add_flag("--check", s.check, "fail unless every bar is met");
  app.allow_extras();
  CLI11_PARSE(app, argc, argv);

  // The first launch of a kernel would wait for what is on the device.
  if (::setenv("CUDA_MODULE_LOADING", "EAGER", 1) != 0)
    bench::fail("no room in the environment");
  bench::watchdog guard{std::chrono::seconds{s.time_limit_s}};
  auto options = app.remaining();
  options.push_back("--troupe.backend=" + s.backend);
  troupe::config cfg;
  must(cfg.parse(options));
  cfg.placement = troupe::placement::worker_process;
  std::vector<bench::bar> bars;
  {
    caf::actor_system sys{cfg};
    guard.enter("opening the world");
    troupe::world_config config;
    config.devices = s.devices.empty() ? must(troupe::list_devices(sys)).ordinals : s.devices;
    config.limits.standby = troupe::standby_policy::full;
    config.limits.restarts = 1 << 20;
    config.limits.restart_backoff = 1ms;
    const auto world = must(troupe::world::open(sys, std::move(config)));
    run(s, sys, world, guard, bars);
    guard.enter("shutting down");
  }
  return !s.check || std::all_of(bars.begin(), bars.end(), [](auto& x) { return x.met(); }) ? 0 : 1;
}
