// Data-parallel training in bfloat16, in worker processes, with one recorded step per iteration.
// With --chaos, it trains once more while workers are killed at random. Memory outlives its worker,
// so a step that fails by a loss simply runs again.

#include "train.hpp"

#include <troupe/blas.hpp>
#include <troupe/troupe.hpp>
#if TROUPE_HAS_CUDA
#include <troupe/cuda_error.hpp>

/// Enqueues a kernel with a thread for each call (train.cu).
template <class F> cudaError_t launch(const F& f, std::size_t calls, cudaStream_t stream);
#endif

#include <caf/all.hpp>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
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
using troupe::bfloat16, troupe::buffer_name, troupe::blas::named_matrix;
template <class T> using refs = std::vector<troupe::gpu_ref<T>>; // one for each rank
constexpr std::size_t batches = 4;                               // take turns
// Of a training; inputs of a layer; of a batch of a rank.
std::size_t steps = 5000, width = 32, points = 32;

// Layer l has size(l) inputs and size(l + 1) outputs.
std::size_t size(std::size_t l) { return l < layers ? width : outputs; }
std::size_t first_weight(std::size_t l) { return l * width * width; }
std::size_t weights() { return first_weight(layers - 1) + width * outputs; }
/// Bytes for the signs of n rows of values: a bit for each, in rows of a multiple of 128.
std::size_t signs_size(std::size_t n) { return n * ((width + 127) / 128 * 16); }

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

/// Makes all calls of `f`, in the process of the device.
template <class F>
caf::error enqueue(troupe::launch_context& context, std::size_t calls, const F& f) {
#if TROUPE_HAS_CUDA
  if (context.cuda_stream() != nullptr)
    return troupe::error_of(launch(f, calls, context.cuda_stream()));
#endif
  return context.run_on_host([f, calls] {
    for (std::size_t at = 0; at < calls; ++at)
      f(at);
  });
}

/// Returns the address of the first number's bits, which are its only member.
template <class T> auto* bits(std::span<T> x) { return &x.data()->bits; }

caf::error enqueue_errors(troupe::launch_context& context, std::span<const bfloat16> data,
                          std::span<const float> results, std::span<bfloat16> slopes,
                          std::span<float> losses) {
  return enqueue(context, losses.size(),
                 point_errors{data.size() / losses.size(), bits(data), results.data(), bits(slopes),
                              losses.data()});
}

caf::error enqueue_update(troupe::launch_context& context, const float& rate,
                          std::span<const float> now, std::span<const float> gradients,
                          std::span<float> next, std::span<bfloat16> copy) {
  return enqueue(context, next.size(),
                 update{rate, now.data(), gradients.data(), next.data(), bits(copy)});
}

/// Records step k with n points per rank. It does not write the model and the data that it reads,
/// and writes all other memory wholly before it reads it. So it can run again, whichever of its
/// requests did run.
troupe::recording record(std::size_t n, std::size_t k) {
  const auto *now = k % 2 ? "model 1" : "model 0", *next = k % 2 ? "model 0" : "model 1";
  const auto *copy = k % 2 ? "copy 1" : "copy 0", *next_copy = k % 2 ? "copy 0" : "copy 1";
  // Weights and gradients of a layer; the values before a layer, and the loss derived by them.
  const auto of_layer = [](const char* name, std::size_t l) {
    return named_matrix{{name, first_weight(l), size(l) * size(l + 1)}, size(l), size(l + 1)};
  };
  const auto between = [&](const char* name, std::size_t l) {
    return named_matrix{{name, l * n * width, n * size(l)}, n, size(l)};
  };
  const named_matrix data{{"data", k * n * width, n * width}, n, width};
  const auto values = [&](std::size_t l) { return l == 0 ? data : between("values", l); };
  const auto signs = [row = signs_size(n)](std::size_t l) {
    return buffer_name{"signs", l * row, row};
  };
  troupe::recording r;
  const auto product = [&](const named_matrix& a, const named_matrix& b, const named_matrix& to,
                           troupe::blas::named_matmul_options what = {}) {
    what.deterministic = true;
    troupe::blas::matmul(r, a, b, to, what);
  };
  const auto transposed = [](const named_matrix& x) {
    return named_matrix{x.memory, x.rows, x.columns, troupe::blas::transpose::transposed};
  };
  const auto mean = 1.0 / static_cast<double>(n);
  for (std::size_t l = 0; l < layers - 1; ++l)
    product(values(l), of_layer(copy, l), values(l + 1),
            {.function = troupe::blas::activation::relu, .auxiliary = signs(l + 1)});
  product(values(layers - 1), of_layer(copy, layers - 1), {"results", n, outputs});
  r.launch("train.errors", {}, {data.memory, "results"},
           {between("slopes", layers).memory, "losses"});
  product({"ones", 1, n}, {"losses", n, 1}, {{"gradients", weights(), 1}, 1, 1}, {.alpha = mean});
  for (auto l = layers; l-- > 0;) {
    product(transposed(values(l)), between("slopes", l + 1), of_layer("gradients", l),
            {.alpha = mean});
    // Runs beside the products of the layers before. The loss is behind the last gradient.
    r.all_reduce({"gradients", first_weight(l), l < layers - 1 ? width * width : buffer_name::rest},
                 troupe::reduce_op::avg);
    if (l > 0)
      product(between("slopes", l + 1), transposed(of_layer(copy, l)), between("slopes", l),
              {.function = troupe::blas::activation::relu_gradient, .auxiliary = signs(l)});
  }
  r.launch("train.update", troupe::to_bytes(1 / static_cast<float>(width)),
           {now, {"gradients", 0, weights()}}, {next, next_copy});
  return r;
}

struct training {
  troupe::world world;
  std::vector<troupe::step> recorded = {}; ///< for each batch
  // Step k reads models[k % 2], and writes the other model. The loss is behind the gradients.
  refs<float> models[2] = {allocate<float>(weights()), allocate<float>(weights())};
  refs<float> gradients = allocate<float>(weights() + 1);
  std::vector<float> results = {}; ///< the losses of all steps, then the weights of all ranks
  std::vector<clock_type::time_point> begins = {}, ends = {}; ///< of steps that succeeded

  template <class T> refs<T> allocate(std::size_t count) const {
    return *must(world.allocate<T>(count));
  }

  /// Prepares steps with n points per rank. The first model, and the points of all ranks together,
  /// are the same for any number of ranks.
  training(const troupe::world& of, std::size_t n) : world{of} {
    std::minstd_rand random{1};
    const auto number = [&] { return static_cast<float>(random() % 2001) / 1000 - 1; };
    std::vector<float> model(weights());
    for (auto& x : model)
      x = number() * std::sqrt(6 / static_cast<float>(width));
    std::vector<std::vector<bfloat16>> points_of(world.size());
    for (std::size_t k = 0; k < batches * world.size(); ++k)
      for (std::size_t i = 0; i < n * width; ++i)
        points_of[k % world.size()].emplace_back(number());
    const refs<bfloat16> copies[] = {allocate<bfloat16>(weights()), allocate<bfloat16>(weights())};
    const auto data = allocate<bfloat16>(batches * n * width);
    const auto ones = allocate<float>(n);
    must(
        troupe::when_all(world.upload(copies[0], std::vector<bfloat16>(model.begin(), model.end())),
                         world.upload(models[0], std::vector<float>(model)),
                         world.upload(data, std::move(points_of)), world.fill(ones, 1.0f))
            .wait());
    const std::vector<troupe::named_buffers> buffers{
        {"data", data},
        {"ones", ones},
        {"model 0", models[0]},
        {"model 1", models[1]},
        {"copy 0", copies[0]},
        {"copy 1", copies[1]},
        {"gradients", gradients},
        {"values", allocate<bfloat16>(layers * n * width)},
        {"signs", allocate<std::uint8_t>(layers * signs_size(n))},
        {"results", allocate<float>(n * outputs)},
        {"losses", allocate<float>(n)},
        {"slopes", allocate<bfloat16>((layers + 1) * n * width)}};
    for (std::size_t k = 0; k < batches; ++k)
      recorded.push_back(*must(world.record(record(n, k), buffers)));
  }

  /// Returns the loss.
  float run_step(std::size_t k) const {
    const auto step = recorded[k % batches].run();
    const auto loss = world.device_of(0).download(*must(gradients[0].slice(weights(), 1)));
    must(step.wait());
    return must(loss)->front();
  }

  /// Runs steps, each until it succeeds. Returns the time of one in milliseconds.
  double run(const char* name, std::size_t number) {
    for (std::size_t k = 0; k <= number;)
      try {
        if (const auto begin = clock_type::now(); k < number) {
          results.push_back(run_step(k));
          begins.push_back(begin);
          ends.push_back(clock_type::now());
        } else if (const auto last = must(world.download(models[k % 2])))
          for (const auto& x : *last)
            results.insert(results.end(), x.begin(), x.end());
        ++k;
      } catch (const caf::error& why) {
        if (std::ranges::any_of(gradients, &troupe::gpu_ref<float>::stale))
          throw troupe::make_error(troupe::errc::stale_ref, "the memory of a lost worker is gone");
        const auto reach =
            troupe::severity_of(troupe::cause_of(why).value_or(troupe::errc::internal));
        if (reach != troupe::severity::device && reach != troupe::severity::communicator)
          throw; // `why` does not follow from the loss of a device or communicator
      }
    const auto time = ms{ends.back() - begins.front()}.count() / static_cast<double>(number);
    std::printf("%s: %.0f steps/s, loss %.3g after %zu steps\n", name, 1e3 / time,
                results[number - 1], number);
    return time;
  }
};

/// Trains on the first device alone, with the points of all ranks, and compares the losses.
///
/// Additions in another order make a float32 sum differ by 2^-23 at most for each addition, and
/// then numbers can be rounded otherwise to bfloat16. A rounding is wrong by 2^-8 at most, by 2^-8
/// / sqrt(3) in the root mean square; two differ by sqrt(2) times that. Independent ones add up in
/// squares. There are 4 * layers - 2 on the way to a gradient: of weights and values forward, and
/// of slopes and weights back. So gradients differ by a share d of their size. In the first steps,
/// the rate is low enough not to enlarge differences, and for results to move by no more than their
/// first error e. So in both trainings they are the same within d |e|. The loss is |e|^2 / 2 with
/// the e of its step, so its root is the same within d times the root of the first loss. Later,
/// trainings with small differences go apart.
void compare(const training& all, caf::actor_system& sys, troupe::world_config plan) {
  plan.devices.resize(1);
  training one{*must(troupe::world::open(sys, plan)), points * all.world.size()};
  const auto number = std::min<std::size_t>(steps, 1000);
  one.run("on one device", number);
  const auto additions = static_cast<double>(2 * layers * width + points * all.world.size());
  const auto d = std::sqrt((4 * layers - 2) * 2 / 3.0) / 256 + additions / (1 << 23);
  const auto bound = d * std::sqrt(one.results[0]);
  double most = 0;
  for (std::size_t k = 0; k < number; ++k)
    most = std::max<double>(most, std::abs(std::sqrt(all.results[k]) - std::sqrt(one.results[k])));
  std::printf("loss on all devices %.6g, on one %.6g; roots of losses differ by at most %.2g, "
              "the bound is %.2g\n",
              all.results[number - 1], one.results[number - 1], most, bound);
  if (!(most <= bound && all.results[number - 1] <= all.results[0])) // also if they are no numbers
    throw troupe::make_error(troupe::errc::internal, "the losses are not those on one device");
}

/// Trains; with chaos once more, while a thread kills workers.
void run(caf::actor_system& sys, const troupe::world_config& plan, bool chaos, double pause_ms) {
  const auto world = *must(troupe::world::open(sys, plan));
  training first{world, points};
  const auto time = first.run("undisturbed", steps);
  compare(first, sys, plan);
  if (!chaos)
    return;
  training second{world, points};
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
  const auto longer = second.run("with kills", steps);
  killer = {}; // ends the thread
  // The first step that begins after a kill needs the next worker: the cost is over at its end.
  for (const auto at : kills)
    if (const auto k = std::ranges::upper_bound(second.begins, at) - second.begins.begin();
        k < std::ssize(second.ends))
      std::printf("a kill cost %.2f ms\n", ms{second.ends[k] - at}.count() - time);
  if (std::memcmp(&first.results[0], &second.results[0], first.results.size() * sizeof(float)) != 0)
    throw troupe::make_error(troupe::errc::internal, "the losses or weights differ");
  std::printf("kills: %zu, time ratio: %.2f, results: same bits\n", kills.size(), longer / time);
}

} // namespace

int main(int argc, char** argv) try {
  constexpr auto replays = troupe::repetition::replays;
  must(troupe::register_launch("train.errors", troupe::typed_launch(enqueue_errors), replays));
  must(troupe::register_launch("train.update", troupe::typed_launch(enqueue_update), replays));
  if (auto status = troupe::worker_main(argc, argv)) // this program is also its own worker
    return *status;
  double pause = 2000;
  bool chaos = false;
  CLI::App app{"Data-parallel training that goes on when workers are killed"};
  app.add_option("--steps", steps, "of the training")->check(CLI::PositiveNumber);
  app.add_option("--width", width, "of the layers")->check(CLI::Range(32, 16'384));
  app.add_option("--batch", points, "of each device")->check(CLI::Range(1, 1'000'000));
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
  run(sys, plan, chaos, pause);
} catch (const caf::error& why) {
  std::fprintf(stderr, "%s\n", troupe::describe(why).c_str());
  return 1;
}
