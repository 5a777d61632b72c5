/// The actor of the inference service. It collects requests in batches, and runs each batch on one
/// of several replicas of the model.
#pragma once

#include "inference_model.hpp"
#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

// [message]
/// A request of a client. The answer is a `host_buffer` with the outputs.
struct question {
  troupe::host_buffer inputs = {};
  troupe::request_options options = {}; ///< `troupe::request` sets the deadline
};

CAF_BEGIN_TYPE_ID_BLOCK(inference, ::troupe::first_message_type_id)
CAF_ADD_TYPE_ID(inference, (question))
CAF_END_TYPE_ID_BLOCK(inference)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(question) // it stays in this process
// [message]

/// The launches, as registered in the processes of the replicas.
inline constexpr const char* dense_launch = "inference.dense";
inline constexpr const char* death_launch = "inference.death"; ///< ends the process

struct service_settings {
  troupe::batch_limits batches;
  std::size_t kill_after = 0; ///< kills a replica after so many answers; 0: never
};

struct service_counts {
  std::size_t answers = 0;
  std::size_t batches = 0;
  std::size_t repeated = 0; ///< requests that a replica did not answer
  std::size_t losses = 0;   ///< of replicas
};

/// Takes `question`s until `troupe::shutdown`. `counts` must outlive the actor.
class inference_service : public caf::event_based_actor {
public:
  inference_service(caf::actor_config& cfg, std::vector<troupe::device> replicas,
                    std::vector<float> weights, const service_settings& settings,
                    service_counts& counts)
      : event_based_actor(cfg), replicas_(std::move(replicas)), weights_(std::move(weights)),
        settings_(settings), waiting_(settings.batches), counts_(counts) {}

  // [behavior]
  caf::behavior make_behavior() override {
    for (auto& device : replicas_)
      loops_.push_back(start(serve(device)));
    loops_.push_back(start(refuse_late()));
    return {troupe::runs_tasks(), [this](const question& x) { return accept(x); },
            [this](const troupe::shutdown&) { start(end()); }};
  }
  // [behavior]

private:
  // [accept]
  /// A request without an answer.
  struct open_request {
    troupe::host_buffer inputs;
    caf::typed_response_promise<troupe::host_buffer> answer;
  };
  using queue = troupe::batch_queue<open_request>;

  /// The memory of a replica.
  struct model {
    troupe::any_gpu_ref weights, inputs, outputs;
  };

  troupe::pending<void> start(troupe::task<> x) {
    return troupe::start(std::move(x), troupe::executor_of(this));
  }

  caf::typed_response_promise<troupe::host_buffer> accept(const question& x) {
    auto answer = make_response_promise<troupe::host_buffer>();
    if (x.inputs.size_bytes() != model_inputs * sizeof(float))
      answer.deliver(troupe::make_error(troupe::errc::shape_mismatch, "wrong number of inputs"));
    else if (!waiting_.push({x.inputs, answer}, x.options.deadline))
      answer.deliver(ended());
    return answer;
  }
  // [accept]

  // [serve]
  /// Answers batches on one replica, until the queue is closed.
  troupe::task<> serve(troupe::device device) {
    while (true) {
      const auto memory = co_await load(device);
      if (!memory && troupe::severity_of(memory.error()) != troupe::severity::device)
        co_await troupe::end_with(memory.error());
      while (memory && !memory->weights.stale()) {
        auto batch = co_await troupe::value_of(waiting_.take());
        if (kill_now())
          device.launch(death_launch, {}, {}, {}); // the batch comes behind it
        const auto outputs = co_await infer(device, *memory, batch);
        finish(std::move(batch), outputs, memory->weights.stale());
      }
      ++counts_.losses;
    }
  }
  // [serve]

  // [load]
  /// Loads the model. If the device was lost, the requests wait until it is back.
  troupe::task<model> load(troupe::device device) {
    const auto type = troupe::dtype::float32;
    const auto rows = settings_.batches.most;
    model result;
    result.weights = co_await troupe::value_of(device.allocate(type, weights_.size()));
    result.inputs = co_await troupe::value_of(device.allocate(type, rows * model_inputs));
    result.outputs = co_await troupe::value_of(device.allocate(type, rows * model_outputs));
    co_await troupe::value_of(device.upload(result.weights, troupe::host_buffer{weights_}));
    co_return result;
  }
  // [load]

  // [infer]
  /// Runs a batch, until the first deadline. The last answer tells of every failure, since outputs
  /// that were not written cannot be read.
  troupe::task<troupe::host_buffer> infer(const troupe::device& device, const model& memory,
                                          const queue::batch& batch) {
    troupe::host_buffer rows{batch.size() * model_inputs * sizeof(float)};
    auto to = rows.as<float>().begin();
    for (auto& x : batch)
      to = std::ranges::copy(x.what.inputs.as<float>(), to).out;
    const auto inputs = *memory.inputs.slice(0, batch.size() * model_inputs);
    const auto outputs = *memory.outputs.slice(0, batch.size() * model_outputs);
    const auto due = std::ranges::min(batch, {}, &queue::entry::due).due;
    const auto left = std::max(std::chrono::nanoseconds{1}, due - queue::clock::now());
    troupe::host_buffer result{outputs.size_bytes()};
    device.upload(inputs, std::move(rows));
    device.launch(dense_launch, {}, {memory.weights, inputs}, {outputs});
    co_await troupe::value_of(device.download(outputs, result, {.deadline = left}));
    co_return result;
  }
  // [infer]

  // [finish]
  /// Answers a batch. If its replica was lost or the first deadline is over, it goes back instead:
  /// any replica may run it again, until the deadlines.
  void finish(queue::batch batch, const caf::expected<troupe::host_buffer>& outputs, bool lost) {
    ++counts_.batches;
    const auto count = batch.size();
    const bool again =
        !outputs && (lost || troupe::code_of(outputs.error()) == troupe::errc::deadline_exceeded);
    if (again && waiting_.give_back(std::move(batch))) {
      counts_.repeated += count;
      return;
    }
    constexpr auto row = model_outputs * sizeof(float);
    for (std::size_t k = 0; k < batch.size(); ++k)
      answer(batch[k], outputs ? outputs->slice(k * row, row) : outputs);
  }
  // [finish]

  troupe::task<> refuse_late() {
    while (true) {
      auto late = co_await troupe::value_of(waiting_.take_late());
      for (auto& x : late) {
        const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(x.due - x.arrived);
        answer(x, troupe::make_error(troupe::errc::deadline_exceeded,
                                     "no answer within " + std::to_string(ms.count()) + " ms"));
      }
    }
  }

  void answer(queue::entry& x, caf::expected<troupe::host_buffer> what) {
    ++counts_.answers;
    if (what)
      x.what.answer.deliver(std::move(*what));
    else
      x.what.answer.deliver(what.error());
  }

  static caf::error ended() {
    return troupe::make_error(troupe::errc::unavailable, "the service has ended");
  }

  /// Returns true once.
  bool kill_now() {
    return settings_.kill_after != 0 && counts_.answers >= settings_.kill_after &&
           !std::exchange(killed_, true);
  }

  // [end]
  troupe::task<> end() {
    for (auto& x : waiting_.close()) // ends the loops
      answer(x, ended());
    for (auto& x : loops_)
      co_await x;
    quit();
  }
  // [end]

  const std::vector<troupe::device> replicas_;
  const std::vector<float> weights_;
  const service_settings settings_;
  queue waiting_;
  std::vector<troupe::pending<void>> loops_;
  service_counts& counts_;
  bool killed_ = false;
};
