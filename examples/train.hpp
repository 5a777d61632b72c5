/// The computations of a step: calls that write results of their own, and add in a fixed order.
#pragma once

#include <cstddef>

/// The model is y = outer * max(0, inner * x). Its weights are those of both layers.
constexpr std::size_t inputs = 16, hidden = 32, inner = hidden * inputs, weights = inner + hidden;
constexpr std::size_t points = 64; ///< of a rank in a step

/// Leaves for a point: the hidden layer, the loss derived by its sums and by y, and the loss.
struct pass {
  static constexpr std::size_t calls = points, size = 2 * hidden + 2;
  const float *model, *batch;
  float* work;
  constexpr void operator()(std::size_t at) const {
    const float *x = batch + at * inputs, *outer = model + inner;
    float *values = work + at * size, *slopes = values + hidden,
          error = -(x[0] * x[1] + x[2]); // the function to learn
    for (std::size_t h = 0; h < hidden; ++h) {
      float sum = 0;
      for (std::size_t i = 0; i < inputs; ++i)
        sum += model[h * inputs + i] * x[i];
      values[h] = sum > 0 ? sum : 0;
      error += outer[h] * values[h];
    }
    for (std::size_t h = 0; h < hidden; ++h)
      slopes[h] = values[h] > 0 ? error * outer[h] : 0;
    slopes[hidden] = error;
    slopes[hidden + 1] = error * error / 2;
  }
};

/// Takes means over the points: of the loss derived by each weight, then of the loss.
struct mean {
  static constexpr std::size_t calls = weights + 1;
  const float *batch, *work;
  float* means;
  constexpr void operator()(std::size_t at) const {
    const float *x = batch, *values = work, *slopes = work + hidden;
    float sum = 0;
    for (auto n = points; n > 0; --n, x += inputs, values += pass::size, slopes += pass::size)
      sum += at < inner     ? slopes[at / inputs] * x[at % inputs]
             : at < weights ? slopes[hidden] * values[at - inner]
                            : slopes[hidden + 1];
    means[at] = sum / points;
  }
};

struct update {
  static constexpr std::size_t calls = weights;
  const float *now, *means;
  float* next;
  constexpr void operator()(std::size_t at) const { next[at] = now[at] - 0.05f * means[at]; }
};
