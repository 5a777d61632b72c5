// Compares a recorded step of small kernels and sums with a CUDA graph by hand, which has NCCL's
// sums and a process for each GPU, and with the same requests made singly. Also takes options of
// the library and of CAF, such as --troupe.devices=2.

#include "machine.hpp"
#include "must.hpp"
#include "rank_threads.hpp"
#include "raw_steps.hpp"
#include "report.hpp"
#include "settings.hpp"
#include "statistics.hpp"
#include "watchdog.hpp"
#include <troupe/troupe.hpp>
#if TROUPE_HAS_CUDA
#include "step_kernels.hpp"
#include <troupe/cuda_error.hpp>
#endif

#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace {

using bench::must;
using nanoseconds = std::chrono::nanoseconds;

constexpr const char* add_one = "bench.add_one";

struct settings : bench::common_settings {
  settings() { time_limit_s = 180; }

  std::size_t ranks = 2;
  std::size_t rounds = 20;
  std::size_t count = 200; ///< steps in a round
  std::size_t kib = 64;
};

caf::error enqueue_add_one(troupe::launch_context& context, std::span<const float>,
                           std::span<float> x) {
#if TROUPE_HAS_CUDA
  if (auto* stream = context.cuda_stream(); stream != nullptr)
    return troupe::error_of(bench::launch_add_one(x.data(), x.size(), stream));
#endif
  return context.run_on_host([x] {
    for (auto& y : x)
      y += 1;
  });
}

#if TROUPE_HAS_CUDA
/// Loads the kernel before the device is ready, so that no sum waits for that.
caf::expected<std::unique_ptr<troupe::library_state>> load(troupe::launch_context& context) {
  if (context.cuda_stream() == nullptr)
    return std::unique_ptr<troupe::library_state>{};
  if (auto error = troupe::error_of(bench::load_add_one()); error)
    return error;
  return std::make_unique<troupe::library_state>();
}
#endif

void register_kernels() {
  must(troupe::register_launch(add_one, troupe::typed_launch(enqueue_add_one),
                               troupe::repetition::replays));
#if TROUPE_HAS_CUDA
  must(troupe::register_library("bench.step", load));
#endif
}

/// The step as requests: recorded, or made one by one.
class requests {
public:
  requests(const troupe::world& w, const bench::step_shape& shape) : w_(w), shape_(shape) {
    x_ = must(w_.allocate<float>(shape.elements));
    troupe::recording all;
    for (std::size_t i = 0; i < shape.sums; ++i) {
      for (std::size_t k = 0; k < shape.kernels; ++k)
        all.launch(add_one, {}, {"x"}, {"x"});
      all.all_reduce("x", troupe::reduce_op::avg);
    }
    step_ = must(w_.record(all, {{"x", x_}}));
  }

  const troupe::step& step() const noexcept { return step_; }

  nanoseconds run_recorded(std::size_t count, std::size_t window) {
    put_first_values();
    std::vector<troupe::pending<troupe::step_done>> open(window);
    const auto begin = bench::clock::now();
    for (std::size_t i = 0; i < count + window; ++i) {
      if (i >= window)
        must(open[i % window].wait());
      if (i < count)
        open[i % window] = step_.run();
    }
    const auto took = bench::clock::now() - begin;
    verify(count);
    return took;
  }

  nanoseconds run_singly(std::size_t count) {
    put_first_values();
    const auto begin = bench::clock::now();
    for (std::size_t n = 0; n < count; ++n)
      for (std::size_t i = 0; i < shape_.sums; ++i) {
        for (std::size_t k = 0; k < shape_.kernels; ++k)
          for (std::size_t rank = 0; rank < w_.size(); ++rank)
            w_.device_of(rank).launch(add_one, {}, {x_[rank]}, {x_[rank]});
        auto sum = w_.all_reduce(x_, troupe::reduce_op::avg);
        if (i + 1 == shape_.sums)
          must(sum.wait());
      }
    const auto took = bench::clock::now() - begin;
    verify(count);
    return took;
  }

private:
  void put_first_values() {
    for (std::size_t rank = 0; rank < w_.size(); ++rank)
      must(w_.device_of(rank).fill(x_[rank], static_cast<float>(rank)).wait());
  }

  void verify(std::size_t count) {
    const auto added = shape_.sums * shape_.kernels * count;
    const auto want = static_cast<float>(w_.size() - 1) / 2 + static_cast<float>(added);
    for (auto& got : must(w_.download(x_)))
      if (std::ranges::any_of(got, [&](float x) { return x != want; }))
        bench::fail("a value of the step is wrong");
  }

  const troupe::world w_;
  const bench::step_shape shape_;
  std::vector<troupe::gpu_ref<float>> x_;
  troupe::step step_;
};

struct cell {
  const char* name = "";
  std::size_t window = 1;
  std::vector<double> recorded = {}, by_hand = {}, ratios = {}; ///< us per step
};

double us_each(nanoseconds all, std::size_t count) {
  return std::chrono::duration<double, std::micro>(all).count() / static_cast<double>(count);
}

void measure(cell& x, requests& own, bench::raw_steps* raw, const settings& s) {
  const auto by_hand = [&] { return us_each(raw->run(s.count, x.window), s.count); };
  own.run_recorded(10, 1);
  for (std::size_t i = 0; i < s.rounds; ++i) {
    const auto before = raw != nullptr ? by_hand() : 0;
    x.recorded.push_back(us_each(own.run_recorded(s.count, x.window), s.count));
    if (raw == nullptr)
      continue;
    x.by_hand.push_back((before + by_hand()) / 2);
    x.ratios.push_back(x.recorded.back() / x.by_hand.back());
  }
}

void run(const settings& s, const std::vector<std::string>& more, bench::raw_steps* raw,
         const bench::step_shape& shape, bench::watchdog& guard, std::vector<bench::bar>& bars) {
  troupe::config cfg;
  auto options = more;
  options.push_back("--troupe.backend=" + s.backend);
  if (auto error = cfg.parse(options))
    bench::fail(troupe::describe(error));
  if (cfg.help_printed())
    return;
  caf::actor_system sys{cfg};
  guard.enter("opening the world");
  troupe::world_config config;
  config.name = "step";
  for (std::size_t i = 0; i < s.ranks; ++i)
    config.devices.push_back(static_cast<int>(i));
  config.collectives = troupe::collectives_policy::direct;
  const auto w = must(troupe::world::open(sys, config));
  auto machine = bench::describe_machine(w);
  std::printf("%s\n", bench::summary(machine).c_str());
  requests own{w, shape};
  std::vector<cell> cells{{"one at a time", 1}, {"16 in flight", 16}};
  std::printf("\n%-20s %12s %12s %8s\n", "us for each step", "recorded", "by hand", "ratio");
  nlohmann::ordered_json json{{"machine", machine}};
  for (auto& x : cells) {
    guard.enter(x.name);
    measure(x, own, raw, s);
    std::printf("%-20s %12.1f %12.1f %8.3f\n", x.name, bench::median(x.recorded),
                bench::median(x.by_hand), bench::median(x.ratios));
    json["us"][x.name] = {{"recorded", x.recorded}, {"by_hand", x.by_hand}};
    if (raw != nullptr)
      bars.push_back({std::string{x.name} + ", to by hand", 0.9, true, bench::median(x.ratios)});
  }
  guard.enter("single requests");
  std::vector<double> single;
  for (std::size_t i = 0; i < std::max<std::size_t>(s.rounds / 4, 1); ++i)
    single.push_back(us_each(own.run_singly(s.count), s.count));
  std::printf("as single requests %14.1f\nthe step runs %s\n", bench::median(single),
              own.step().runs_as().c_str());
  json["us"]["single requests"] = single;
  bench::print_bars(bars);
  json["bars"] = bench::to_json(bars);
  bench::write_json(s.json_file, json);
  guard.enter("shutting down");
}

} // namespace

int main(int argc, char** argv) {
  register_kernels();
  if (auto status = troupe::worker_main(argc, argv))
    return *status;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  settings s;
  CLI::App app{"A recorded step, and a CUDA graph by hand"};
  s.add_to(app);
  app.add_option("--ranks", s.ranks)->check(CLI::Range(1, 8))->capture_default_str();
  app.add_option("--rounds", s.rounds)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--count", s.count, "steps in a round")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--kib", s.kib, "of each rank")
      ->check(CLI::Range(1, 1 << 16))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const bench::step_shape shape{.elements = s.kib * 1024 / sizeof(float)};
  std::unique_ptr<bench::raw_steps> raw;
#if TROUPE_HAS_CUDA
  if (s.backend == "cuda") // before this process calls CUDA
    raw = bench::start_raw_steps(s.ranks, shape);
#endif
  bench::watchdog guard{std::chrono::seconds{s.time_limit_s}};
  std::vector<bench::bar> bars;
  run(s, app.remaining(), raw.get(), shape, guard, bars);
  return s.pass(bars) ? 0 : 1;
}
