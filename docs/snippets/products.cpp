// The snippets of the page on matrix products.

#include "checks.hpp"
#include <troupe/blas.hpp>
#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

using snippets::check;
using snippets::must;

namespace {

constexpr std::size_t rows = 32, inputs = 16, outputs = 128;

void run(caf::actor_system& sys) {
  namespace blas = troupe::blas;
  const auto device = must(troupe::device::open(sys, 0));
  const auto x = must(device.allocate<float>(rows * inputs));
  const auto w = must(device.allocate<float>(inputs * outputs));
  const auto y = must(device.allocate<float>(rows * outputs));
  const auto bias = must(device.allocate<float>(outputs));
  const auto positive = must(device.allocate<std::uint8_t>(rows * outputs / 8));
  device.fill(x, 1.0f);
  device.fill(w, 2.0f);
  device.fill(bias, -32.0f);
  // [prepare]
  const blas::matmul_options layer{
      .bias = bias, .function = blas::activation::relu, .auxiliary = positive};
  auto prepared =
      blas::prepare(device, {x, rows, inputs}, {w, inputs, outputs}, {y, rows, outputs}, layer);
  // [prepare]
  must(prepared.wait());
  // [forward]
  auto done = blas::matmul(
      device, {x, rows, inputs}, {w, inputs, outputs}, // 32 x 16, 16 x 128
      {y, rows, outputs},
      {.bias = bias, .function = blas::activation::relu, .auxiliary = positive}); // bits
  // [forward]
  must(done.wait());
  check(must(device.download(y)) == std::vector<float>(rows * outputs, 0.0f), "the layer");
  device.fill(bias, 1.0f);
  blas::matmul(device, {x, rows, inputs}, {w, inputs, outputs}, {y, rows, outputs}, layer);
  check(must(device.download(y)) == std::vector<float>(rows * outputs, 33.0f), "the layer");
  const auto gradient = must(device.allocate<float>(rows * inputs));
  const auto next_w = must(device.allocate<float>(outputs * inputs));
  const auto sums = must(device.allocate<float>(outputs));
  device.fill(gradient, 1.0f);
  device.fill(next_w, 0.5f);
  // [backward]
  auto back = blas::matmul(
      device, {gradient, rows, inputs},                       // of the next layer
      {next_w, outputs, inputs, blas::transpose::transposed}, // its weights
      {y, rows, outputs},                                     // becomes the gradient here
      {.function = blas::activation::relu_gradient, .auxiliary = positive, .bias_gradient = sums});
  // [backward]
  must(back.wait());
  check(must(device.download(y)) == std::vector<float>(rows * outputs, 8.0f), "the gradient");
  check(must(device.download(sums)) == std::vector<float>(outputs, 256.0f), "the sums");
  const auto world = must(troupe::world::open(sys, {.devices = {0}}));
  // [record]
  troupe::recording r;
  blas::matmul(r, {"x", rows, inputs}, {"w", inputs, outputs}, {"y", rows, outputs},
               {.bias = "bias"});
  r.all_reduce("y");
  // [record]
  const auto step = must(world.record(r, {{"x", std::vector{x}},
                                          {"w", std::vector{w}},
                                          {"y", std::vector{y}},
                                          {"bias", std::vector{bias}}}));
  must(step.run().wait());
  check(must(device.download(y)) == std::vector<float>(rows * outputs, 33.0f), "the step");
}

} // namespace

int main(int argc, char** argv) { return snippets::run_with_devices(argc, argv, run); }
