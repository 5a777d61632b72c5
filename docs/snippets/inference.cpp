// An inference service: an actor that answers requests of other actors in batches, on two replicas
// of a model. One of the devices is lost while it works. The model is a linear function.

#include "checks.hpp"
#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <deque>
#include <exception>
#include <iostream>
#include <numeric>
#include <random>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

using namespace std::chrono_literals;
using snippets::check;
using snippets::must;

namespace {

using clock_type = std::chrono::steady_clock;

constexpr std::size_t inputs = 8;
constexpr std::size_t largest_batch = 32;
constexpr auto answer_within = 5s;
const std::vector<float> weights{1, -2, 3, -4, 5, -6, 7, -8};

// [model]
/// output[i] = the model's answer to input[i]. On GPUs this enqueues kernels, or calls a library.
caf::error infer(troupe::launch_context& context, std::span<const troupe::any_gpu_ref> reads,
                 std::span<const troupe::any_gpu_ref> writes, std::span<const std::byte>) {
  auto model = reads[0].access();
  auto input = reads[1].access();
  auto output = writes[0].access();
  if (!model || !input || !output)
    return !model ? model.error() : !input ? input.error() : output.error();
  return context.run_on_host([w = static_cast<const float*>(*model),
                              x = static_cast<const float*>(*input),
                              y = static_cast<float*>(*output), n = writes[0].count()] {
    for (std::size_t i = 0; i < n; ++i)
      y[i] = std::inner_product(w, w + inputs, x + i * inputs, 0.0f);
  });
}
// [model]

// [replica]
struct question {
  troupe::host_buffer input;
  clock_type::time_point until;
  caf::typed_response_promise<troupe::host_buffer> answer;
};

struct replica {
  troupe::device device;
  troupe::any_gpu_ref model = {};
  troupe::any_gpu_ref input = {};
  troupe::any_gpu_ref output = {};
  bool loaded = false;
  std::vector<question> batch = {}; // that it works on; empty: it is idle
};
// [replica]

// [service]
class service : public caf::event_based_actor {
public:
  service(caf::actor_config& cfg, const std::vector<troupe::device>& devices)
      : event_based_actor(cfg) {
    for (auto& x : devices)
      replicas_.push_back({x});
  }

  caf::behavior make_behavior() override {
    for (auto& x : replicas_)
      troupe::start(load(x), troupe::executor_of(this));
    return {[this](const troupe::host_buffer& input) -> caf::result<troupe::host_buffer> {
              auto answer = make_response_promise<troupe::host_buffer>();
              waiting_.push_back({input, clock_type::now() + answer_within, answer});
              dispatch();
              return answer;
            },
            troupe::runs_tasks()};
  }

  /// Leaves no question without an answer.
  void on_exit() override {
    const auto why = troupe::make_error(troupe::errc::unavailable, "the service has ended");
    for (auto& x : std::exchange(waiting_, {}))
      x.answer.deliver(why);
    for (auto& replica : replicas_)
      for (auto& x : std::exchange(replica.batch, {}))
        x.answer.deliver(why);
  }

private:
  /// Gives each idle replica what waits now. While all are busy, the next batch grows.
  void dispatch() {
    for (auto& x : replicas_)
      if (x.loaded && x.batch.empty())
        if (x.batch = next_batch(); !x.batch.empty())
          troupe::start(serve(x), troupe::executor_of(this));
  }

  std::vector<question> next_batch() {
    std::vector<question> result;
    for (; !waiting_.empty() && result.size() < largest_batch; waiting_.pop_front())
      if (clock_type::now() < waiting_.front().until)
        result.push_back(std::move(waiting_.front()));
      else
        waiting_.front().answer.deliver(
            troupe::make_error(troupe::errc::deadline_exceeded, "no replica was free in time"));
    return result;
  }
  // [service]

  // [serve]
  troupe::task<> serve(replica& on) {
    const auto outputs = co_await run(on); // a caf::expected
    auto batch = std::exchange(on.batch, {});
    if (outputs) {
      for (std::size_t i = 0; i < batch.size(); ++i)
        batch[i].answer.deliver(troupe::host_buffer{std::vector<float>{(*outputs)[i]}});
    } else if (on.model.stale()) { // the device was lost or reset
      // The other replica has to do it.
      waiting_.insert(waiting_.begin(), batch.begin(), batch.end());
      on.loaded = false;
      troupe::start(load(on), troupe::executor_of(this));
    } else {
      for (auto& x : batch)
        x.answer.deliver(outputs.error());
    }
    dispatch();
  }

  /// Three requests that are ordered by their memory, and one wait.
  troupe::task<std::vector<float>> run(const replica& on) {
    const auto& batch = on.batch;
    std::vector<float> in(largest_batch * inputs);
    auto until = batch.front().until;
    for (std::size_t i = 0; i < batch.size(); ++i) {
      std::ranges::copy(batch[i].input.as<float>().first(inputs), &in[i * inputs]);
      until = std::min(until, batch[i].until);
    }
    std::vector<float> out(largest_batch);
    const troupe::request_options in_time{.deadline = until - clock_type::now()};
    on.device.upload(on.input, troupe::host_buffer{std::move(in)}, in_time);
    on.device.launch("infer", {}, {on.model, on.input}, {on.output}, in_time);
    co_await troupe::value_of(
        on.device.download(on.output, std::as_writable_bytes(std::span{out}), in_time));
    co_return out;
  }
  // [serve]

  // [load]
  /// Loads the model; again if the device is lost meanwhile. A lost device gets its next generation
  /// by itself: the first request without handles waits for it.
  troupe::task<> load(replica& on) {
    while (true) {
      const auto loaded = co_await load_once(on);
      if (loaded)
        break;
      if (on.device.phase() == troupe::device_phase::failed || !on.model.stale())
        co_return; // this replica is out of service
    }
    on.loaded = true;
    dispatch();
  }

  troupe::task<> load_once(replica& on) {
    const auto f32 = troupe::dtype::float32;
    auto memory = co_await troupe::value_of(troupe::when_all(
        on.device.allocate(f32, inputs), on.device.allocate(f32, largest_batch * inputs),
        on.device.allocate(f32, largest_batch)));
    std::tie(on.model, on.input, on.output) = std::move(memory);
    co_await troupe::value_of(
        on.device.upload(on.model, troupe::host_buffer{std::vector<float>{weights}}));
  }
  // [load]

  std::vector<replica> replicas_;
  std::deque<question> waiting_;
};

float expected_answer(const std::vector<float>& x) {
  return std::inner_product(x.begin(), x.end(), weights.begin(), 0.0f);
}

/// Sends `count` questions, and checks each answer. Loses a device in between.
void ask(caf::actor_system& sys, const caf::actor& to, const troupe::device& victim, bool kill) {
  std::mt19937 random{7};
  std::uniform_int_distribution<int> number{-100, 100};
  caf::scoped_actor self{sys};
  for (int round = 0; round < 40; ++round) {
    std::vector<float> wanted;
    // [client]
    auto send = [&](std::vector<float> input) {
      return troupe::request(self, to, troupe::host_buffer{std::move(input)}, 10s);
    };
    // [client]
    std::vector<decltype(send({}))> answers;
    for (int i = 0; i < 100; ++i) {
      std::vector<float> x(inputs);
      std::ranges::generate(x, [&] { return static_cast<float>(number(random)); });
      wanted.push_back(expected_answer(x));
      answers.push_back(send(std::move(x)));
      if (round == 10 && i == 50 && kill)
        victim.launch("die", {}, {}, {});
      if (round == 10 && i == 50 && !kill)
        victim.reset();
    }
    for (std::size_t i = 0; i < answers.size(); ++i)
      std::move(answers[i])
          .receive(
              [&](const troupe::host_buffer& y) {
                check(y.as<float>().size() == 1 && y.as<float>()[0] == wanted[i], "an answer");
              },
              [](const caf::error& why) { must(why); });
  }
  // The service ends while questions wait: each of them gets an answer or an error, and soon.
  std::vector<decltype(troupe::request(self, to, troupe::host_buffer{}, 10s))> last;
  for (int i = 0; i < 200; ++i)
    last.push_back(troupe::request(self, to, troupe::host_buffer{std::vector<float>(inputs)}, 10s));
  self->send_exit(to, caf::exit_reason::user_shutdown);
  for (auto& x : last)
    std::move(x).receive([](const troupe::host_buffer&) {},
                         [](const caf::error& why) {
                           check(why != caf::sec::request_timeout, "a question without an answer");
                         });
}

int report(const caf::error& why) {
  std::cerr << troupe::describe(why) << '\n';
  return 1;
}

int run(int argc, char** argv) {
  must(troupe::register_launch("die", [](troupe::launch_context&, auto, auto, auto) {
    std::raise(SIGKILL); // for the test
    return caf::error{};
  }));
  // [main]
  if (auto error = troupe::register_launch("infer", infer))
    return report(error);
  if (auto status = troupe::worker_main(argc, argv)) // this program is its own worker, too
    return *status;
  // [main]
  troupe::config cfg;
  must(cfg.parse(argc, argv));
  caf::actor_system sys{cfg};
  snippets::only_on_host(sys);
  std::vector<troupe::device> devices;
  for (int ordinal : {0, 1})
    devices.push_back(must(troupe::device::open(sys, ordinal)));
  const auto answering = sys.spawn<service>(devices);
  ask(sys, answering, devices[0], cfg.placement == troupe::placement::worker_process);
  check(devices[0].generation() > 1, "the loss of a device");
  std::cout << "every answer was right\n";
  return 0;
}

} // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& why) {
    std::cerr << why.what() << '\n';
    return 1;
  }
}
