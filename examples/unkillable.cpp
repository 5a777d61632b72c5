// Sums over all devices without an end, each checked, with every device in a worker process of its
// own and a warm spare beside it: kill workers by hand, or let --chaos do it. One line a second
// says how it goes. Options of the library and of CAF are understood too: --troupe.devices=4.

#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

using namespace std::chrono_literals;

namespace {

using clock_type = std::chrono::steady_clock;

constexpr const char* die = "unkillable.die";

std::atomic<bool> stopped{false};

double milliseconds(clock_type::duration x) {
  return std::chrono::duration<double, std::milli>(x).count();
}

int report(const caf::error& why) {
  std::fprintf(stderr, "%s\n", troupe::describe(why).c_str());
  return 1;
}

/// The sums, and what became of them.
class summing {
public:
  summing(const troupe::world& over, std::size_t count) : world_(over), count_(count) {}

  /// One sum, right on every rank; an error if devices were lost on the way.
  caf::error once() {
    refs_.resize(world_.size());
    for (std::size_t i = 0; i < refs_.size(); ++i) {
      const auto device = world_.device_of(i);
      if (!refs_[i] || refs_[i].stale()) {
        auto fresh = device.allocate<float>(count_); // waits for the device's next life
        if (!fresh)
          return fresh.error();
        refs_[i] = std::move(*fresh);
      }
      device.fill(refs_[i], static_cast<float>(i + 1)); // not waited for: the sum comes after it
    }
    auto done = world_.all_reduce(refs_).wait();
    if (!done)
      return done.error();
    note_success();
    const auto n = refs_.size();
    const auto want = static_cast<float>(n * (n + 1) / 2);
    for (std::size_t i = 0; i < n; ++i) {
      auto got = world_.device_of(i).download(refs_[i]);
      if (!got)
        return got.error();
      wrong += static_cast<std::uint64_t>(
          std::count_if(got->begin(), got->end(), [&](float x) { return x != want; }));
    }
    ++sums;
    return {};
  }
  void note_loss() {
    if (!lost_at_)
      lost_at_ = clock_type::now();
  }

  std::uint64_t sums = 0;
  std::uint64_t losses = 0;
  std::uint64_t wrong = 0;     ///< elements
  clock_type::duration last{}; ///< pause, from an error to the next sum
  clock_type::duration longest{};

private:
  void note_success() {
    if (!lost_at_)
      return;
    last = clock_type::now() - *std::exchange(lost_at_, std::nullopt);
    longest = std::max(longest, last);
    ++losses;
  }

  const troupe::world& world_;
  const std::size_t count_;
  std::vector<troupe::gpu_ref<float>> refs_;
  std::optional<clock_type::time_point> lost_at_;
};

} // namespace

int main(int argc, char** argv) {
  if (auto error = troupe::register_launch(die, [](troupe::launch_context&, auto, auto, auto) {
        std::raise(SIGKILL);
        return caf::error{};
      }))
    return report(error);
  if (auto status = troupe::worker_main(argc, argv)) // this program is its own worker, too
    return *status;

  std::string backend = "auto";
  double seconds = 0;
  std::size_t count = 1 << 16;
  bool chaos = false;
  CLI::App app{"Sums over devices in worker processes that may be killed at any time"};
  app.add_option("--backend", backend, "auto, cuda or host (virtual devices)")
      ->capture_default_str();
  app.add_option("--seconds", seconds, "how long; by default until Ctrl-C");
  app.add_option("--elements", count, "of each buffer")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_flag("--chaos", chaos, "kills a worker whenever the world is ready for it");
  app.allow_extras();
  CLI11_PARSE(app, argc, argv);
  std::signal(SIGINT, [](int) { stopped = true; });

  troupe::config cfg;
  auto more = app.remaining();
  more.push_back("--troupe.backend=" + backend);
  if (auto error = cfg.parse(more))
    return report(error);
  cfg.placement = troupe::placement::worker_process;
  caf::actor_system sys{cfg};
  auto list = troupe::list_devices(sys);
  if (!list)
    return report(list.error());
  troupe::world_config config;
  config.devices = list->ordinals;
  config.limits.standby = troupe::standby_policy::full;
  config.limits.restarts = std::numeric_limits<int>::max();
  const auto world = troupe::world::open(sys, config);
  if (!world)
    return report(world.error());
  std::printf(
      "backend %s, %zu devices, each in a worker process of its own with a spare beside it; "
      "kill what you like:\n  pgrep -P %d\n",
      list->backend.c_str(), world->size(), static_cast<int>(::getpid()));

  std::mt19937 random{std::random_device{}()};
  summing work{*world, count};
  const auto begin = clock_type::now();
  auto next_line = begin + 1s;
  auto sums_before = work.sums;
  while (!stopped && work.wrong == 0 &&
         (seconds == 0 || clock_type::now() < begin + std::chrono::duration<double>{seconds})) {
    if (auto error = work.once()) {
      const auto code = troupe::code_of(error);
      if (!code || troupe::severity_of(*code) == troupe::severity::process ||
          *code == troupe::errc::unavailable)
        return report(error);
      work.note_loss();
    }
    const auto now = clock_type::now();
    if (now < next_line)
      continue;
    next_line += 1s;
    const auto status = world->status();
    std::printf("%8llu sums/s  %zu ranks  epoch %llu  %s  %llu losses, last pause %.2f ms\n",
                static_cast<unsigned long long>(work.sums - std::exchange(sums_before, work.sums)),
                world->size(), static_cast<unsigned long long>(status.epoch),
                status.standby_ready ? "standby ready   " : "standby building",
                static_cast<unsigned long long>(work.losses), milliseconds(work.last));
    std::fflush(stdout);
    if (chaos && status.standby_ready) {
      world->device_of(random() % world->size()).launch(die, {}, {}, {}); // nobody waits for it
    }
  }
  std::printf("%llu sums, %llu wrong elements, %llu losses, longest pause %.2f ms\n",
              static_cast<unsigned long long>(work.sums),
              static_cast<unsigned long long>(work.wrong),
              static_cast<unsigned long long>(work.losses), milliseconds(work.longest));
  return work.wrong == 0 ? 0 : 1;
}
