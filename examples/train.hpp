/// The model, and what a step computes besides products: calls that write results of their own.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

/// Layers of weights without bias. The first ones have as many outputs as inputs, and relu.
constexpr std::size_t layers = 3, outputs = 16;

/// A number in bfloat16 as it is stored: the upper half of a float.
using narrow = std::uint16_t;

constexpr float wide(narrow x) { return std::bit_cast<float>(std::uint32_t{x} << 16); }

/// Rounds a finite number to the nearest one, between two to the even one.
constexpr narrow rounded(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  return static_cast<narrow>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/// Leaves for a point: how far the outputs are from the function to learn, and the loss.
struct point_errors {
  std::size_t width;
  const narrow* points;
  const float* results;
  narrow* errors;
  float* losses;
  constexpr void operator()(std::size_t at) const {
    const auto* x = points + at * width;
    float loss = 0;
    for (std::size_t i = 0; i < outputs; ++i) {
      const float a = wide(x[i]), b = wide(x[i + 1]);
      const float error = results[at * outputs + i] - (a > b ? a : b);
      errors[at * outputs + i] = rounded(error);
      loss += error * error / 2;
    }
    losses[at] = loss;
  }
};

/// Leaves a weight of the next model, also in bfloat16 for its products.
struct update {
  float rate;
  const float *now, *gradients;
  float* next;
  narrow* copy;
  constexpr void operator()(std::size_t at) const {
    next[at] = now[at] - rate * gradients[at];
    copy[at] = rounded(next[at]);
  }
};
