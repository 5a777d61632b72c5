// Endless checked sums over all devices, by actors beside their devices in worker processes, each
// with a warm spare. Kill workers by hand, or use --chaos. One line per second shows the state.
// Also takes options of the library and of CAF, such as --troupe.devices=4.

#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
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
constexpr const char* add_up = "unkillable.sums";

std::atomic<bool> stopped{false};

int report(const caf::error& why) {
  std::fprintf(stderr, "%s\n", troupe::describe(why).c_str());
  return 1;
}

/// Work of a rank's actor since its last report.
struct progress {
  std::uint64_t sums = 0;
  std::uint64_t wrong = 0;  ///< elements
  std::uint64_t pauses = 0; ///< from an error to the next right sum
  double last_pause_ms = 0;
  double longest_pause_ms = 0;
};

/// The loop of one rank, in the process that has its device.
class summing {
public:
  summing(const troupe::program_place& place, std::uint32_t elements)
      : place_(place), elements_(elements) {}

  /// Runs until the world ends or a request fails for a reason other than a loss.
  caf::error run() {
    auto ref = place_.rank.where().allocate<float>(elements_);
    if (!ref)
      return ref.error();
    while (true) {
      if (auto error = once(*ref)) {
        const auto code = troupe::code_of(error);
        if (code == troupe::errc::unavailable)
          return {}; // the world ended
        if (!code || troupe::severity_of(*code) == troupe::severity::process)
          return error;
        if (!failed_at_)
          failed_at_ = clock_type::now();
      }
      if (clock_type::now() >= next_report_) {
        next_report_ = clock_type::now() + 100ms;
        if (place_.report(troupe::to_bytes(std::exchange(done_, progress{}))))
          return {}; // the parent is gone
      }
    }
  }

private:
  /// Sums once, and checks the result. All ranks name the same membership, so after a loss they
  /// meet in the next one.
  caf::error once(const troupe::gpu_ref<float>& ref) {
    const auto view = place_.rank.status();
    const auto device = place_.rank.where();
    device.fill(ref, static_cast<float>(place_.rank.index() + 1)); // the sum comes after it
    auto sum =
        place_.rank.all_reduce(ref, troupe::reduce_op::sum, {.membership = view.membership}).wait();
    if (!sum)
      return sum.error();
    const auto answered = clock_type::now();
    auto got = device.download(ref);
    if (!got)
      return got.error();
    const auto n = place_.rank.size();
    const auto want = static_cast<float>(n * (n + 1) / 2);
    done_.wrong += static_cast<std::uint64_t>(
        std::count_if(got->begin(), got->end(), [&](float x) { return x != want; }));
    ++done_.sums;
    if (failed_at_) {
      done_.last_pause_ms = std::chrono::duration<double, std::milli>(
                                answered - *std::exchange(failed_at_, std::nullopt))
                                .count();
      done_.longest_pause_ms = std::max(done_.longest_pause_ms, done_.last_pause_ms);
      ++done_.pauses;
    }
    return {};
  }

  const troupe::program_place& place_;
  const std::uint32_t elements_;
  progress done_;
  std::optional<clock_type::time_point> failed_at_;
  clock_type::time_point next_report_ = clock_type::now();
};

caf::actor begin_sums(const troupe::program_place& place) {
  return place.system.spawn([place](caf::blocking_actor* self) {
    const auto elements = troupe::from_bytes<std::uint32_t>(place.arguments);
    if (!elements)
      return self->fail_state(elements.error());
    if (auto error = summing{place, *elements}.run())
      self->fail_state(error);
  });
}

} // namespace

int main(int argc, char** argv) {
  auto registered = troupe::register_program(add_up, begin_sums);
  if (!registered)
    registered = troupe::register_launch(die, [](troupe::launch_context&, auto, auto, auto) {
      std::raise(SIGKILL);
      return caf::error{};
    });
  if (registered)
    return report(registered);
  if (auto status = troupe::worker_main(argc, argv)) // this program is also its own worker
    return *status;

  std::string backend = "auto";
  double seconds = 0;
  std::uint32_t elements = 1 << 16;
  bool chaos = false;
  CLI::App app{"Sums over devices in worker processes that may be killed at any time"};
  app.add_option("--backend", backend, "auto, cuda or host (virtual devices)")
      ->capture_default_str();
  app.add_option("--seconds", seconds, "how long; by default until Ctrl-C");
  app.add_option("--elements", elements, "of each buffer")
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
  if (cfg.help_printed())
    return 0;
  cfg.placement = troupe::placement::worker_process;
  caf::actor_system sys{cfg};
  auto list = troupe::list_devices(sys);
  if (!list)
    return report(list.error());
  troupe::world_config config;
  config.devices = list->ordinals;
  config.limits.standby = troupe::standby_policy::full;
  config.limits.restarts = std::numeric_limits<int>::max();
  config.program.name = add_up;
  config.program.arguments = troupe::to_bytes(elements);
  const auto world = troupe::world::open(sys, config);
  if (!world)
    return report(world.error());
  std::printf(
      "backend %s, %zu devices, each in a worker process of its own with a spare beside it; "
      "kill what you like:\n  pgrep -P %d\n",
      list->backend.c_str(), world->size(), static_cast<int>(::getpid()));
  std::fflush(stdout);

  caf::scoped_actor self{sys};
  troupe::tell(self, world->actor(), troupe::subscribe{});
  std::mt19937 random{std::random_device{}()};
  progress all; // of all ranks; sums of the first one
  std::uint64_t sums_before = 0;
  std::uint64_t losses = 0;
  auto status = world->status();
  int result = 0;
  const auto begin = clock_type::now();
  auto next_line = begin + 1s;
  while (!stopped && result == 0 && all.wrong == 0 &&
         (seconds == 0 || clock_type::now() < begin + std::chrono::duration<double>{seconds})) {
    self->receive(
        [&](const troupe::world_status& x) {
          losses += x.membership > status.membership ? 1 : 0;
          status = x;
        },
        [&](const troupe::program_report& x) {
          const auto more_done = troupe::from_bytes<progress>(x.bytes);
          if (!more_done) {
            result = report(more_done.error());
            return;
          }
          if (x.rank == 0)
            all.sums += more_done->sums;
          all.wrong += more_done->wrong;
          if (more_done->pauses > 0)
            all.last_pause_ms = more_done->last_pause_ms;
          all.longest_pause_ms = std::max(all.longest_pause_ms, more_done->longest_pause_ms);
        },
        [&](const troupe::program_ended& x) {
          if (x.why)
            result = report(x.why);
        },
        caf::after(std::chrono::milliseconds(100)) >> [] {});
    if (status.phase == troupe::world_phase::failed)
      result = report(status.reason);
    if (clock_type::now() < next_line)
      continue;
    next_line += 1s;
    std::printf("%8llu sums/s  %zu ranks  epoch %llu  %s  %llu losses, last pause %.2f ms\n",
                static_cast<unsigned long long>(all.sums - std::exchange(sums_before, all.sums)),
                status.members.size(), static_cast<unsigned long long>(status.epoch),
                status.standby_ready ? "standby ready   " : "standby building",
                static_cast<unsigned long long>(losses), all.last_pause_ms);
    std::fflush(stdout);
    if (chaos && status.standby_ready)
      world->device_of(random() % world->size()).launch(die, {}, {}, {}); // not awaited
  }
  std::printf("%llu sums on each rank, %llu wrong elements, %llu losses, longest pause %.2f ms\n",
              static_cast<unsigned long long>(all.sums), static_cast<unsigned long long>(all.wrong),
              static_cast<unsigned long long>(losses), all.longest_pause_ms);
  return all.wrong == 0 ? result : 1;
}
