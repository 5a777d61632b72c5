// A data-parallel training loop that goes on after a stalled collective and after a lost device: it
// learns the weights of a linear function from random points.

#include "checks.hpp"
#include <troupe/testing/fault_plan.hpp>
#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <exception>
#include <iostream>
#include <memory>
#include <random>
#include <span>
#include <utility>
#include <vector>

using namespace std::chrono_literals;
using snippets::check;
using snippets::must;

namespace {

constexpr std::size_t inputs = 4;
constexpr std::size_t points = 256; // of each rank
constexpr float learning_rate = 0.1f;
constexpr std::array<float, inputs> truth{1.5f, -2.0f, 0.25f, 3.0f};

/// grads = the gradient of the squared error over the rank's points. On GPUs this is a kernel.
caf::error backward(troupe::launch_context& context, std::span<const float> weights,
                    std::span<const float> data, std::span<float> grads) {
  return context.run_on_host([w = weights, d = data, g = grads] {
    std::ranges::fill(g, 0.0f);
    for (std::size_t i = 0; i < points; ++i) {
      const auto row = d.subspan(i * (inputs + 1), inputs + 1);
      float error = -row[inputs];
      for (std::size_t k = 0; k < inputs; ++k)
        error += w[k] * row[k];
      for (std::size_t k = 0; k < inputs; ++k)
        g[k] += 2 * error * row[k] / points;
    }
  });
}

// [update]
/// result = weights - rate * grads; in place, if `result` is `weights`.
caf::error update(troupe::launch_context& context, const float& rate,
                  std::span<const float> weights, std::span<const float> grads,
                  std::span<float> result) {
  return context.run_on_host([rate = rate, w = weights, g = grads, result] {
    for (std::size_t k = 0; k < inputs; ++k)
      result[k] = w[k] - rate * g[k];
  });
}
// [update]

/// The points of a rank: inputs, and what the function gives for them.
std::vector<float> points_of(std::size_t rank) {
  std::mt19937 random{static_cast<unsigned>(rank) + 1};
  std::uniform_real_distribution<float> number{-1, 1};
  std::vector<float> result;
  for (std::size_t i = 0; i < points; ++i) {
    float y = 0;
    for (float factor : truth) {
      result.push_back(number(random));
      y += factor * result.back();
    }
    result.push_back(y);
  }
  return result;
}

// [state]
class trainer {
public:
  explicit trainer(troupe::world world) : world_(std::move(world)) {}

  caf::error train(int steps) {
    caf::error error;
    for (int step = 0; step < steps && !error; ++step) {
      error = weights_.empty() ? load() : train_once();
      if (!error && step % 10 == 9)
        error = save();
      if (error)
        error = recover(error);
    }
    return error;
  }
  // [state]

  const std::vector<float>& saved() const noexcept { return saved_; }

private:
  // [step]
  /// Three requests for each step; the host waits once, for the last one.
  caf::error train_once() {
    using troupe::any;
    world_.launch("backward", {}, /* reads */ {any(weights_), any(data_)},
                  /* writes */ {any(grads_)});
    world_.all_reduce(grads_, troupe::reduce_op::avg, {.deadline = 2s});
    auto updated = world_.launch("update", troupe::to_bytes(learning_rate),
                                 {any(weights_), any(grads_)}, {any(weights_)});
    auto done = updated.wait();
    return done ? caf::error{} : done.error(); // also the cause, if an earlier request failed
  }
  // [step]

  // [checkpoint]
  /// Allocates on every rank, and uploads the data and the last checkpoint.
  caf::error load() {
    auto weights = world_.allocate<float>(inputs);
    auto grads = world_.allocate<float>(inputs);
    auto data = world_.allocate<float>(points * (inputs + 1));
    if (!weights || !grads || !data)
      return !weights ? weights.error() : !grads ? grads.error() : data.error();
    weights_ = std::move(*weights);
    grads_ = std::move(*grads);
    data_ = std::move(*data);
    std::vector<std::vector<float>> parts;
    for (std::size_t r = 0; r < world_.size(); ++r)
      parts.push_back(points_of(r));
    auto loaded = troupe::when_all(world_.upload(weights_, saved_), // the same for each rank
                                   world_.upload(data_, std::move(parts)));
    auto done = loaded.wait();
    return done ? caf::error{} : done.error();
  }

  caf::error save() {
    auto weights = world_.device_of(0).download(weights_[0]);
    if (!weights)
      return weights.error();
    saved_ = std::move(*weights);
    failures_ = 0;
    return {};
  }
  // [checkpoint]

  // [recover]
  /// Goes on from the last checkpoint. Gives up if three attempts in a row reach none.
  caf::error recover(const caf::error& why) {
    if (troupe::severity_of(why) == troupe::severity::process) // CUDA is gone in this process
      troupe::exit_process(1, troupe::describe(why));
    if (++failures_ > 3)
      return why;
    std::cerr << "from the last checkpoint: " << troupe::describe(why) << '\n';
    return load(); // waits until lost devices are back, and the world has a communicator
  }
  // [recover]

  troupe::world world_;
  std::vector<troupe::gpu_ref<float>> weights_;
  std::vector<troupe::gpu_ref<float>> grads_;
  std::vector<troupe::gpu_ref<float>> data_;
  std::vector<float> saved_ = std::vector<float>(inputs);
  int failures_ = 0;
};

void check_truth(const std::vector<float>& weights) {
  for (std::size_t k = 0; k < inputs; ++k)
    check(std::abs(weights[k] - truth[k]) < 1e-3f, "a weight");
}

} // namespace

int main() {
  try {
    // [launches]
    must(troupe::register_launch("backward", troupe::typed_launch(backward)));
    must(troupe::register_launch("update", troupe::typed_launch(update)));
    // [launches]
    // The third rank does not take part in the 25th sum of its device.
    auto plan = std::make_shared<troupe::testing::fault_plan>();
    plan->add({.kind = troupe::testing::fault::not_issued,
               .on = troupe::testing::verb::collective,
               .device = 2,
               .first = 25});
    troupe::config cfg;
    cfg.use_backend(troupe::testing::with_faults(troupe::make_host_backend({.devices = 4}), plan));
    caf::actor_system sys{cfg};
    // [limits]
    troupe::world_config config;
    config.devices = troupe::all_devices(sys);
    config.limits.stall_limit = 200ms; // longer than any collective of the loop takes
    config.limits.standby = troupe::standby_policy::communicators; // go on at once
    auto world = troupe::world::open(sys, config);
    // [limits]
    if (!world)
      must(world.error());
    trainer loop{*world};
    must(loop.train(150));
    check(plan->injected() == 1, "one stalled sum");
    must(world->device_of(1).reset().wait());
    must(loop.train(150));
    check_truth(loop.saved());
  } catch (const std::exception& why) {
    std::cerr << why.what() << '\n';
    return 1;
  }
  std::cout << "the weights are right\n";
  return 0;
}
