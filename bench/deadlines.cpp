// Measures how late answers come after their deadlines. The requests wait behind a launch that does
// not end, on an idle system and beside sums of another world, as calls and as messages of an
// actor. Also takes options of the library and of CAF, such as --troupe.spin=0.

#include "machine.hpp"
#include "must.hpp"
#include "rank_threads.hpp"
#include "report.hpp"
#include "settings.hpp"
#include "statistics.hpp"
#include "watchdog.hpp"
#include <troupe/request.hpp>
#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <latch>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using namespace std::chrono_literals;

namespace {

using bench::must;

constexpr std::size_t count = 1024; ///< elements of a sum

struct settings : bench::common_settings {
  settings() { time_limit_s = 120; }

  std::size_t requests = 2000;
  std::size_t span_ms = 2000;
};

/// Delays of answers after their deadlines.
struct series {
  const char* name;
  std::vector<double> late; ///< ms
};

std::vector<std::chrono::nanoseconds> deadlines_of(const settings& s, std::uint64_t seed) {
  std::mt19937_64 random{seed};
  std::uniform_int_distribution<std::int64_t> some{1'000'000, static_cast<std::int64_t>(s.span_ms) *
                                                                  1'000'000};
  std::vector<std::chrono::nanoseconds> result(s.requests);
  for (auto& x : result)
    x = std::chrono::nanoseconds{some(random)};
  return result;
}

double ms_since(bench::clock::time_point when) {
  return bench::microseconds(bench::clock::now() - when) / 1e3;
}

void expect_late(const caf::error& x) {
  if (troupe::code_of(x) != troupe::errc::deadline_exceeded)
    bench::fail("not a deadline: " + troupe::describe(x));
}

/// Blocks all work of a device during its lifetime.
class blocked_device {
public:
  explicit blocked_device(troupe::device on)
      : on_(std::move(on)), memory_(must(on_.allocate<float>(16))),
        launch_(on_.launch(
            [this](troupe::launch_context& c) {
              return c.run_on_host([this] { open_.wait(false); });
            },
            {}, {memory_}, {.deadline = 1h})) {}
  ~blocked_device() {
    open_ = true;
    open_.notify_all();
    must(launch_.wait());
  }
  blocked_device(const blocked_device&) = delete;
  blocked_device& operator=(const blocked_device&) = delete;

  const troupe::device& device() const { return on_; }
  const troupe::any_gpu_ref& memory() const { return memory_.any(); }

private:
  std::atomic<bool> open_{false};
  troupe::device on_;
  troupe::gpu_ref<float> memory_;
  troupe::pending<void> launch_;
};

/// Makes requests whose answers come on the library's own thread.
void call(const blocked_device& x, const std::vector<std::chrono::nanoseconds>& deadlines,
          series& into) {
  std::latch all{static_cast<std::ptrdiff_t>(deadlines.size())};
  for (const auto deadline : deadlines) {
    const auto due = bench::clock::now() + deadline;
    x.device().fill(x.memory(), 0.0f, {.deadline = deadline}).then([&, due](const auto& answer) {
      expect_late(answer.error());
      into.late.push_back(ms_since(due));
      all.count_down();
    });
  }
  all.wait();
}

/// Makes requests whose answers come to the mailbox of an actor in CAF's pool.
void ask(caf::actor_system& sys, const blocked_device& x,
         const std::vector<std::chrono::nanoseconds>& deadlines, series& into) {
  std::latch all{static_cast<std::ptrdiff_t>(deadlines.size())};
  sys.spawn([&](caf::event_based_actor* self) {
    for (const auto deadline : deadlines) {
      const auto due = bench::clock::now() + deadline;
      troupe::request(self, x.device(), troupe::fill{.target = x.memory(), .element = 0.0f},
                      deadline)
          .then([] { bench::fail("what was held back is done"); },
                [&, due](const caf::error& why) {
                  expect_late(why);
                  into.late.push_back(ms_since(due));
                  all.count_down();
                });
    }
  });
  all.wait();
}

void measure(const settings& s, caf::actor_system& sys, series& calls, series& messages) {
  const blocked_device held{must(troupe::device::open(sys, 0))};
  call(held, deadlines_of(s, 1), calls);
  ask(sys, held, deadlines_of(s, 2), messages);
}

/// Runs sums without a pause during its lifetime.
class load {
public:
  explicit load(caf::actor_system& sys)
      : world_(must(troupe::world::open(sys, {.devices = {1, 2}}))),
        memory_(must(world_.allocate<float>(count))), thread_([this](const std::stop_token& stop) {
          while (!stop.stop_requested())
            must(world_.all_reduce(memory_, troupe::reduce_op::max).wait());
        }) {}

private:
  troupe::world world_;
  std::vector<troupe::gpu_ref<float>> memory_;
  std::jthread thread_;
};

nlohmann::ordered_json print(const series& x) {
  const double median = bench::median(x.late);
  const double p99 = bench::quantile(x.late, 0.99);
  const double most = bench::quantile(x.late, 1);
  std::printf("%-40s %9.3f %9.3f %9.3f\n", x.name, median, p99, most);
  return {{"median", median}, {"p99", p99}, {"max", most}, {"number", x.late.size()}};
}

} // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  settings s;
  CLI::App app{"How late answers come behind their deadlines"};
  s.add_to(app);
  app.add_option("--requests", s.requests, "of each kind")
      ->check(CLI::Range(1, 4000))
      ->capture_default_str();
  app.add_option("--span-ms", s.span_ms, "deadlines are at most so far away")
      ->check(CLI::Range(2, 60000))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);

  bench::watchdog guard{std::chrono::seconds{s.time_limit_s}};
  troupe::config cfg;
  auto options = app.remaining();
  options.push_back("--troupe.backend=" + s.backend);
  if (s.backend != "cuda")
    options.emplace_back("--troupe.devices=3");
  if (auto error = cfg.parse(options))
    bench::fail(troupe::describe(error));
  if (cfg.help_printed())
    return 0;
  caf::actor_system sys{cfg};
  guard.enter("opening a device");
  auto machine = bench::describe_machine({must(troupe::device::open(sys, 0))});
  std::printf("%zu answers of each kind, behind deadlines of up to %zu ms\n%s\n", s.requests,
              s.span_ms, bench::summary(machine).c_str());
  series calls{"calls", {}};
  series messages{"messages of an actor", {}};
  series calls_under_load{"calls beside sums", {}};
  series messages_under_load{"messages of an actor beside sums", {}};
  guard.enter("answers alone");
  measure(s, sys, calls, messages);
  if (troupe::all_devices(sys).size() > 2) {
    guard.enter("answers beside sums");
    const load sums{sys};
    measure(s, sys, calls_under_load, messages_under_load);
  }

  guard.enter("the report");
  std::printf("\n%-40s %9s %9s %9s\n", "ms behind the deadline", "median", "p99", "max");
  nlohmann::ordered_json json{{"machine", machine}};
  std::vector<bench::bar> bars;
  for (auto* x : {&calls, &messages, &calls_under_load, &messages_under_load}) {
    if (x->late.empty())
      continue;
    json["ms"][x->name] = print(*x);
    bars.push_back({std::string{x->name} + ", p99, ms", 5, true, bench::quantile(x->late, 0.99)});
  }
  bench::print_bars(bars);
  json["bars"] = bench::to_json(bars);
  bench::write_json(s.json_file, json);
  guard.enter("shutting down");
  return s.pass(bars) ? 0 : 1;
}
