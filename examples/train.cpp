// Data-parallel training in worker processes. With --chaos, it trains once more while workers are
// killed at random. Memory outlives its worker, so a step that fails by a loss simply runs again.

#include "train.hpp"

#include <troupe/troupe.hpp>
#if TROUPE_HAS_CUDA
#include <troupe/cuda_error.hpp>

/// Enqueues a kernel with a thread for each call (train.cu).
template <class F> cudaError_t launch(const F& f, cudaStream_t stream);
#endif

#include <caf/all.hpp>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <random>
#include <span>
#include <thread>
#include <vector>

namespace {

using clock_type = std::chrono::steady_clock;
using ms = std::chrono::duration<double, std::milli>;
using refs = std::vector<troupe::gpu_ref<float>>; // one for each rank
std::size_t steps = 5000;                         // of each training

void must(const caf::error& why) {
  if (why)
    throw why;
}

/// Returns a result without an error. Throws the error if there is one.
template <class T> T must(T result) {
  if (!result)
    throw result.error();
  return result;
}

/// A launch, in the process of the device: makes all calls of an F.
template <class F>
caf::error enqueue(troupe::launch_context& context, std::span<const float> x,
                   std::span<const float> y, std::span<float> results) {
  const F f{x.data(), y.data(), results.data()};
#if TROUPE_HAS_CUDA
  if (context.cuda_stream() != nullptr)
    return troupe::error_of(launch(f, context.cuda_stream()));
#endif
  return context.run_on_host([f] {
    for (std::size_t at = 0; at < F::calls; ++at)
      f(at);
  });
}

struct training {
  static constexpr std::size_t batches = 16, batch_size = points * inputs; ///< batches take turns
  troupe::world world;
  // Memory on all ranks. Step k reads models[k % 2], and writes the other model.
  refs models[2] = {allocate(weights), allocate(weights)};
  refs data = allocate(batches * world.size() * batch_size);
  refs work = allocate(points * pass::size), means = allocate(weights + 1);
  std::vector<float> results = {}; ///< the losses of all steps, then the weights of all ranks
  std::vector<clock_type::time_point> begins = {}, ends = {}; ///< of steps that succeeded

  /// Returns memory with random numbers, the same on all ranks.
  refs allocate(std::size_t count) const {
    std::vector<float> content(count);
    std::minstd_rand random{1};
    for (auto& x : content)
      x = static_cast<float>(random() % 2001) / 1000 - 1;
    auto to = *must(world.allocate<float>(count));
    if (const auto done = world.upload(to, content).wait(); !done)
      throw done.error();
    return to;
  }

  /// Returns the loss. The step does not write the model that it reads, and writes all other memory
  /// wholly before it reads it. So it can run again, whichever of its requests did run.
  float run_step(std::size_t k) const {
    const auto now = any(models[k % 2]), next = any(models[(k + 1) % 2]);
    std::vector<troupe::any_gpu_ref> batch; // its share for each rank
    for (std::size_t r = 0; r < world.size(); ++r)
      batch.push_back(*data[r].slice((k % batches * world.size() + r) * batch_size, batch_size));
    world.launch("train.pass", {}, {now, batch}, {any(work)});
    world.launch("train.mean", {}, {batch, any(work)}, {any(means)});
    world.all_reduce(means, troupe::reduce_op::avg);
    if (const auto done = world.launch("train.update", {}, {now, any(means)}, {next}).wait(); !done)
      throw done.error();
    return must(world.device_of(0).download(*means[0].slice(weights, 1)))->front();
  }

  /// Runs all steps, each until it succeeds. Returns the time in milliseconds.
  double run(const char* name) {
    for (std::size_t k = 0; k <= steps;)
      try {
        if (const auto begin = clock_type::now(); k < steps) {
          results.push_back(run_step(k));
          begins.push_back(begin);
          ends.push_back(clock_type::now());
        } else if (const auto last = must(world.download(models[k % 2])))
          for (const auto& x : *last)
            results.insert(results.end(), x.begin(), x.end());
        ++k;
      } catch (const caf::error& why) {
        if (std::ranges::any_of(means, &troupe::gpu_ref<float>::stale))
          throw troupe::make_error(troupe::errc::stale_ref, "the memory of a lost worker is gone");
        const auto reach =
            troupe::severity_of(troupe::cause_of(why).value_or(troupe::errc::internal));
        if (reach != troupe::severity::device && reach != troupe::severity::communicator)
          throw; // `why` does not follow from the loss of a device or communicator
      }
    const auto time = ms{ends.back() - begins.front()}.count();
    std::printf("%s: %.0f steps/s, loss %.3g\n", name, 1e3 * steps / time, results[steps - 1]);
    return time;
  }
};

/// Trains; with chaos once more, while a thread kills workers.
void run(const troupe::world& world, bool chaos, double pause_ms) {
  training first{world};
  const auto time = first.run("undisturbed");
  if (!chaos)
    return;
  training second{world};
  std::vector<clock_type::time_point> kills;
  std::jthread killer{[&](const auto& stop) {
    std::mt19937 random{std::random_device{}()};
    std::geometric_distribution<> us{0.001 / pause_ms};
    while (troupe::after(std::chrono::microseconds{us(random)}).cancel_on(stop).wait())
      if (const auto x = world.device_of(random() % world.size()).stats().wait();
          x && x->worker_pid > 0) {
        kills.push_back(clock_type::now());
        ::kill(static_cast<pid_t>(x->worker_pid), SIGKILL);
      }
  }};
  const auto longer = second.run("with kills");
  killer = {}; // ends the thread
  // The first step that begins after a kill needs the next worker: the cost is over at its end.
  for (const auto at : kills)
    if (const auto k = std::ranges::upper_bound(second.begins, at) - second.begins.begin();
        k < std::ssize(second.ends))
      std::printf("a kill cost %.2f ms\n", ms{second.ends[k] - at}.count() - time / steps);
  if (std::memcmp(&first.results[0], &second.results[0], first.results.size() * sizeof(float)) != 0)
    throw troupe::make_error(troupe::errc::internal, "the losses or weights differ");
  std::printf("kills: %zu, time ratio: %.2f, results: same bits\n", kills.size(), longer / time);
}

} // namespace

int main(int argc, char** argv) try {
  must(troupe::register_launch("train.pass", troupe::typed_launch(enqueue<pass>)));
  must(troupe::register_launch("train.mean", troupe::typed_launch(enqueue<mean>)));
  must(troupe::register_launch("train.update", troupe::typed_launch(enqueue<update>)));
  if (auto status = troupe::worker_main(argc, argv)) // this program is also its own worker
    return *status;
  double pause = 2000;
  bool chaos = false;
  CLI::App app{"Data-parallel training that goes on when workers are killed"};
  app.add_option("--steps", steps, "of the training")->check(CLI::PositiveNumber);
  app.add_option("--pause", pause, "between kills, in milliseconds")->check(CLI::Range(1, 100'000));
  app.add_flag("--chaos", chaos, "train again, and kill workers at random");
  app.allow_extras();
  CLI11_PARSE(app, argc, argv);
  troupe::config cfg;
  must(cfg.parse(app.remaining()));
  if (cfg.help_printed())
    return 0;
  cfg.placement = troupe::placement::worker_process;
  caf::actor_system sys{cfg};
  troupe::world_config plan{.devices = troupe::all_devices(sys)}; // no pause, however many losses
  plan.limits = {
      .restarts = 99999, .restart_backoff = {}, .standby = troupe::standby_policy::spares};
  run(*must(troupe::world::open(sys, plan)), chaos, pause);
} catch (const caf::error& why) {
  std::fprintf(stderr, "%s\n", troupe::describe(why).c_str());
  return 1;
}
