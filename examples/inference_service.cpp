// An inference service under load. Clients send requests with deadlines to an actor
// (inference_actor.hpp), which runs them in batches on two replicas of a model: each is a device in
// a worker process of its own. If a replica is lost (--kill), its requests run again on the other
// one, since they are pure. Each request gets one answer: the right one, or an error that names its
// deadline. The clients check that. Also takes options of the library and of CAF.

#include "inference_actor.hpp"
#include "inference_model.hpp"
#include <troupe/troupe.hpp>
#if TROUPE_HAS_CUDA
#include <troupe/cuda_error.hpp>
#endif

#include <caf/all.hpp>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace {

using clock_type = std::chrono::steady_clock;
using numbers = std::vector<float>;

struct settings {
  std::size_t clients = 8;
  std::size_t requests = 1000; ///< of each client
  std::size_t batch = 32;
  std::size_t patience_us = 500;
  std::size_t deadline_ms = 10'000;
  bool kill = false;
};

/// Returns the exit code of the program.
int report(const caf::error& why) {
  if (why)
    std::fprintf(stderr, "%s\n", troupe::describe(why).c_str());
  return why ? 1 : 0;
}

/// Returns small integers, so that no order of additions rounds.
numbers random_numbers(std::size_t count, std::mt19937& random) {
  std::uniform_int_distribution<int> digit{-8, 8};
  numbers result(count);
  std::ranges::generate(result, [&] { return static_cast<float>(digit(random)); });
  return result;
}

// -- launches, in the process of the device

// [launch]
caf::error enqueue_dense(troupe::launch_context& context, std::span<const float> weights,
                         std::span<const float> inputs, std::span<float> outputs) {
  const auto count = outputs.size() / model_outputs;
#if TROUPE_HAS_CUDA
  if (context.cuda_stream() != nullptr)
    return troupe::error_of(
        launch_dense(weights.data(), inputs.data(), outputs.data(), count, context.cuda_stream()));
#endif
  return context.run_on_host([w = weights.data(), x = inputs.data(), y = outputs.data(), count] {
    dense_on_host(w, x, y, count);
  });
}
// [launch]

/// Ends the process, as a fault would.
caf::error die(troupe::launch_context&) {
  std::raise(SIGKILL);
  return {};
}

struct result {
  int answers = 0;
  enum { none, right, late, wrong } kind = none; ///< late: an error that names the deadline
  double milliseconds = 0;
};

/// Has some requests open at a time, until each has an answer. `results` must outlive the actor.
class client : public caf::event_based_actor {
public:
  client(caf::actor_config& cfg, caf::actor service, const numbers& weights, const settings& s,
         std::uint32_t seed, std::span<result> results)
      : event_based_actor(cfg), service_(std::move(service)), weights_(weights), settings_(s),
        random_(seed), results_(results) {}

  caf::behavior make_behavior() override {
    for (int open = 0; open < 16; ++open)
      ask_next();
    return {}; // the actor lives as long as an answer is outstanding
  }

private:
  void ask_next() {
    if (next_ == results_.size())
      return;
    auto& to = results_[next_++];
    const auto inputs = random_numbers(model_inputs, random_);
    numbers want(model_outputs);
    dense_on_host(weights_.data(), inputs.data(), want.data(), 1);
    // [request]
    troupe::request(this, service_, question{troupe::host_buffer{inputs}},
                    std::chrono::milliseconds{settings_.deadline_ms})
        .then(
            [this, &to, want, begin = clock_type::now()](const troupe::host_buffer& outputs) {
              const std::chrono::duration<double, std::milli> time = clock_type::now() - begin;
              to.milliseconds = time.count();
              to.kind =
                  std::ranges::equal(outputs.as<float>(), want) ? result::right : result::wrong;
              count(to);
            },
            [this, &to](const caf::error& why) {
              const bool late = troupe::code_of(why) == troupe::errc::deadline_exceeded;
              to.kind = late ? result::late : result::wrong;
              if (!late)
                report(why);
              count(to);
            });
    // [request]
  }

  void count(result& x) {
    ++x.answers;
    ask_next();
  }

  const caf::actor service_;
  const numbers weights_;
  const settings settings_;
  std::mt19937 random_;
  const std::span<result> results_;
  std::size_t next_ = 0;
};

/// Prints what became of the requests. Returns an error if one was lost, was answered twice or got
/// a wrong answer.
caf::error check(const std::vector<result>& results, const service_counts& counts, double seconds,
                 bool kill) {
  const auto kinds = [&](auto kind) { return std::ranges::count(results, kind, &result::kind); };
  std::vector<double> times;
  for (auto& x : results)
    if (x.kind == result::right)
      times.push_back(x.milliseconds);
  std::ranges::sort(times);
  const auto percentile = [&](std::size_t p) {
    return times.empty() ? 0 : times[(times.size() - 1) * p / 100];
  };
  std::printf("%zu requests: %td right, %td late, %td wrong\n", results.size(),
              kinds(result::right), kinds(result::late), kinds(result::wrong));
  std::printf("%zu batches, %zu requests repeated, %zu replicas lost\n", counts.batches,
              counts.repeated, counts.losses);
  std::printf("%.0f requests/s, latency p50 %.3f ms, p99 %.3f ms\n",
              static_cast<double>(results.size()) / seconds, percentile(50), percentile(99));
  const auto failed = [](const char* why) {
    return troupe::make_error(troupe::errc::internal, why);
  };
  if (counts.answers != results.size() ||
      std::ranges::count(results, 1, &result::answers) != std::ssize(results))
    return failed("a request was lost or was answered twice");
  if (kinds(result::wrong) != 0)
    return failed("wrong answers");
  if (kill && counts.losses == 0)
    return failed("no replica was killed");
  std::printf("each request has got one answer\n");
  return {};
}

caf::error run(caf::actor_system& sys, const std::vector<troupe::device>& replicas,
               const settings& s) {
  std::mt19937 random{1};
  const auto weights = random_numbers(model_inputs * model_outputs, random);
  const auto all = s.clients * s.requests;
  const service_settings limits{{s.batch, std::chrono::microseconds{s.patience_us}},
                                s.kill ? (all + 1) / 2 : 0};
  service_counts counts;
  std::vector<result> results(all);
  caf::scoped_actor self{sys};
  const auto begin = clock_type::now();
  const auto service = sys.spawn<inference_service>(replicas, weights, limits, std::ref(counts));
  std::vector<caf::actor> clients;
  for (std::size_t i = 0; i < s.clients; ++i)
    clients.push_back(sys.spawn<client>(service, weights, s, static_cast<std::uint32_t>(random()),
                                        std::span{results}.subspan(i * s.requests, s.requests)));
  self->wait_for(clients);
  const std::chrono::duration<double> time = clock_type::now() - begin;
  troupe::tell(self, service, troupe::shutdown{});
  self->wait_for(service);
  return check(results, counts, time.count(), s.kill);
}

} // namespace

int main(int argc, char** argv) {
  // [main]
  troupe::register_messages<caf::id_block::inference>();
  auto registered = troupe::register_launch(dense_launch, troupe::typed_launch(enqueue_dense));
  if (!registered)
    registered = troupe::register_launch(death_launch, troupe::typed_launch(die));
  if (registered)
    return report(registered);
  if (auto status = troupe::worker_main(argc, argv)) // this program is also its own worker
    return *status;
  // [main]

  settings s;
  CLI::App app{"An inference service with dynamic batches on two replicas of a model"};
  app.option_defaults()->always_capture_default();
  const CLI::Range number{1, 10'000}, time{1, 100'000'000};
  app.add_option("--patience", s.patience_us, "microseconds to wait for others")->check(time);
  app.add_option("--clients", s.clients, "actors that send requests")->check(number);
  app.add_option("--requests", s.requests, "number for each client")->check(number);
  app.add_option("--batch", s.batch, "maximum number of requests in a batch")->check(number);
  app.add_option("--deadline", s.deadline_ms, "of a request, in milliseconds")->check(time);
  app.add_flag("--kill", s.kill, "kill a replica when half of the requests are answered");
  app.allow_extras();
  CLI11_PARSE(app, argc, argv);

  troupe::config cfg;
  if (auto error = cfg.parse(app.remaining()))
    return report(error);
  if (cfg.help_printed())
    return 0;
  cfg.placement = troupe::placement::worker_process;
  caf::actor_system sys{cfg};
  const auto list = troupe::list_devices(sys);
  if (!list)
    return report(list.error());
  std::vector<troupe::device> replicas;
  for (std::size_t i = 0; i < std::min<std::size_t>(2, list->ordinals.size()); ++i) {
    auto device = troupe::device::open(sys, list->ordinals[i]);
    if (!device)
      return report(device.error());
    replicas.push_back(*device);
  }
  std::printf("backend %s, %zu replicas\n", list->backend.c_str(), replicas.size());
  return report(run(sys, replicas, s));
}
