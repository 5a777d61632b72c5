// An inference service under load. It answers requests of actors in batches, on two replicas of a
// model (troupe::batch_server). Each replica is a device in a worker process of its own. With
// --kill, one of these processes is killed under load, and the requests that it loses run again.
// The clients check that each request gets the right answer, or an error that names its deadline.
// Also takes options of the library and of CAF.

#include <troupe/troupe.hpp>
#if TROUPE_HAS_CUDA
#include <troupe/cuda_error.hpp>

/// Enqueues a kernel for `count` outputs (inference_service.cu).
cudaError_t launch_dense(const float* w, const float* x, float* y, std::size_t count,
                         std::size_t inputs, std::size_t outputs, cudaStream_t stream);
#endif

#include <caf/all.hpp>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <random>
#include <ranges>
#include <span>
#include <vector>

namespace {

using clock_type = std::chrono::steady_clock;
using milliseconds = std::chrono::duration<double, std::milli>;
using numbers = std::vector<float>;
using buffers = std::vector<troupe::host_buffer>;

/// Options of the command line.
struct {
  std::size_t clients = 8, requests = 1000, batch = 32, patience_us = 500, deadline_ms = 10'000;
  bool kill = false;
} options;

std::atomic<std::size_t> killed{0}; ///< processes

/// Returns the exit code of the program.
int report(const caf::error& why) {
  if (why)
    std::fprintf(stderr, "%s\n", troupe::describe(why).c_str());
  return why ? 1 : 0;
}

/// Returns small integers, so that no order of additions rounds.
numbers random_numbers(std::size_t count, std::size_t seed) {
  std::minstd_rand random{static_cast<unsigned>(seed)};
  numbers result(count);
  std::ranges::generate(result, [&] { return static_cast<float>(random() % 17) - 8; });
  return result;
}

constexpr std::size_t model_inputs = 256;
constexpr std::size_t model_outputs = 64;
const numbers model_weights = random_numbers(model_outputs * model_inputs, 1);

// [model]
/// Computes y[k][o] = max(0, sum over i of w[o][i] * x[k][i]) for each row k of x.
void dense_on_host(std::span<const float> w, std::span<const float> x, std::span<float> y) {
  for (std::size_t at = 0; at < y.size(); ++at) {
    float sum = 0;
    for (std::size_t i = 0; i < model_inputs; ++i)
      sum += w[at % model_outputs * model_inputs + i] * x[at / model_outputs * model_inputs + i];
    y[at] = std::max(sum, 0.0f);
  }
}

/// A launch, in the process of the device.
caf::error enqueue_dense(troupe::launch_context& context, std::span<const float> w,
                         std::span<const float> x, std::span<float> y) {
#if TROUPE_HAS_CUDA
  if (auto* stream = context.cuda_stream(); stream != nullptr)
    return troupe::error_of(
        launch_dense(w.data(), x.data(), y.data(), y.size(), model_inputs, model_outputs, stream));
#endif
  return context.run_on_host([=] { dense_on_host(w, x, y); });
}

/// The model on a device, with memory for a batch.
struct model {
  troupe::any_gpu_ref weights, inputs, outputs;
};

troupe::task<model> load(const troupe::device& on) {
  constexpr auto type = troupe::dtype::float32;
  model x;
  x.weights = co_await troupe::value_of(on.allocate(type, model_weights.size()));
  x.inputs = co_await troupe::value_of(on.allocate(type, options.batch * model_inputs));
  x.outputs = co_await troupe::value_of(on.allocate(type, options.batch * model_outputs));
  co_await troupe::value_of(on.upload(x.weights, troupe::host_buffer{model_weights}));
  co_return x;
}

troupe::task<buffers> infer(const troupe::device& on, const model& with, const buffers& batch) {
  static std::size_t begun = 0; // requests
  const auto half = options.clients * options.requests / 2;
  int worker = 0;
  if (options.kill && begun < half && (begun += batch.size()) >= half)
    worker = (co_await troupe::value_of(on.stats())).worker_pid;
  const auto inputs = *with.inputs.slice(0, batch.size() * model_inputs);
  const auto outputs = *with.outputs.slice(0, batch.size() * model_outputs);
  const troupe::host_buffer results{outputs.size_bytes()};
  on.upload(inputs, troupe::concatenate(batch));
  on.launch("inference.dense", {}, {with.weights, inputs}, {outputs});
  if (worker != 0) // a process of this host
    killed += ::kill(worker, SIGKILL) == 0 ? 1 : 0;
  co_await troupe::value_of(on.download(outputs, results)); // fails if one of the others does
  co_return *results.split(batch.size());
}

using service = troupe::batch_server<troupe::host_buffer, troupe::host_buffer, model>;
// [model]

/// The answers that the clients have got.
struct outcome {
  std::atomic<std::size_t> right{0}, late{0}, wrong{0}; ///< late: an error that names the deadline
  std::vector<double> milliseconds;                     ///< of each request
};

// [client]
/// Makes every `step`th request, each when the one before it has its answer.
troupe::task<> ask(service& from, outcome& all, std::size_t first, std::size_t step) {
  for (auto at = first; at < all.milliseconds.size(); at += step) {
    const auto inputs = random_numbers(model_inputs, at + 1);
    numbers want(model_outputs);
    dense_on_host(model_weights, inputs, want);
    const auto begin = clock_type::now();
    const auto outputs = co_await from.ask(troupe::host_buffer{inputs},
                                           std::chrono::milliseconds{options.deadline_ms});
    all.milliseconds[at] = milliseconds{clock_type::now() - begin}.count();
    if (outputs)
      ++(std::ranges::equal(outputs->as<float>(), want) ? all.right : all.wrong);
    else if (troupe::code_of(outputs.error()) == troupe::errc::deadline_exceeded)
      ++all.late;
    else
      all.wrong += report(outputs.error());
  }
}

/// Has 16 requests open at a time.
caf::behavior client(caf::event_based_actor* self, service* from, outcome* all, std::size_t i) {
  std::vector<troupe::pending<void>> open;
  for (std::size_t k = 16 * i; k < 16 * (i + 1); ++k)
    open.push_back(start(ask(*from, *all, k, 16 * options.clients), troupe::executor_of(self)));
  troupe::when_all(open).then(troupe::executor_of(self), [self](const auto&) { self->quit(); });
  return {troupe::runs_tasks()};
}
// [client]

/// Prints what became of the requests.
/// @errors errc::internal: a request was lost or got a wrong answer, or no process was killed
caf::error check(outcome& all, const troupe::batch_counts& counts, double seconds) {
  auto& times = all.milliseconds;
  std::ranges::sort(times);
  const auto percentile = [&](std::size_t p) { return times[(times.size() - 1) * p / 100]; };
  std::printf("%zu requests: %zu right, %zu late, %zu wrong\n", times.size(), all.right.load(),
              all.late.load(), all.wrong.load());
  std::printf("processes killed: %zu, batches: %zu, requests repeated: %zu\n", killed.load(),
              counts.batches, counts.repeated);
  std::printf("%.0f requests/s, latency p50 %.3f ms, p99 %.3f ms\n",
              static_cast<double>(times.size()) / seconds, percentile(50), percentile(99));
  if (all.right + all.late != times.size() || counts.answers != times.size() ||
      (options.kill && killed == 0))
    return troupe::make_error(troupe::errc::internal,
                              "a request was lost or got a wrong answer, or no process was killed");
  std::printf("each request has got one answer\n");
  return {};
}

caf::error run(caf::actor_system& sys) {
  const auto list = troupe::list_devices(sys);
  if (!list)
    return list.error();
  std::vector<troupe::device> replicas;
  for (const int x : list->ordinals | std::views::take(2))
    if (auto device = troupe::device::open(sys, x))
      replicas.push_back(*device);
    else
      return device.error();
  std::printf("backend %s, %zu replicas\n", list->backend.c_str(), replicas.size());
  // [server]
  const troupe::batch_limits limits{options.batch, std::chrono::microseconds{options.patience_us}};
  service answering{replicas, limits, load, infer};
  // [server]
  outcome all{.milliseconds = std::vector<double>(options.clients * options.requests)};
  const auto begin = clock_type::now();
  std::vector<caf::actor> clients;
  for (std::size_t i = 0; i < options.clients; ++i)
    clients.push_back(sys.spawn(client, &answering, &all, i));
  caf::scoped_actor self{sys};
  self->wait_for(clients);
  return check(all, answering.counts(), milliseconds{clock_type::now() - begin}.count() / 1000);
}

} // namespace

int main(int argc, char** argv) {
  if (auto error = troupe::register_launch("inference.dense", troupe::typed_launch(enqueue_dense)))
    return report(error);
  if (auto status = troupe::worker_main(argc, argv)) // this program is also its own worker
    return *status;
  CLI::App app{"An inference service with dynamic batches on two replicas of a model"};
  app.option_defaults()->always_capture_default();
  const CLI::Range number{1, 10'000}, time{1, 100'000'000};
  app.add_option("--patience", options.patience_us, "microseconds to wait for others")->check(time);
  app.add_option("--clients", options.clients, "actors that send requests")->check(number);
  app.add_option("--requests", options.requests, "number for each client")->check(number);
  app.add_option("--batch", options.batch, "maximum number of requests in a batch")->check(number);
  app.add_option("--deadline", options.deadline_ms, "of a request, in milliseconds")->check(time);
  app.add_flag("--kill", options.kill, "kill a replica when half of the requests are answered");
  app.allow_extras();
  CLI11_PARSE(app, argc, argv);
  troupe::config cfg;
  if (auto error = cfg.parse(app.remaining()); error || cfg.help_printed())
    return report(error);
  cfg.placement = troupe::placement::worker_process;
  caf::actor_system sys{cfg};
  return report(run(sys));
}
