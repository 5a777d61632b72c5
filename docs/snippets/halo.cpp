// Heat in a plate of rows, split over the ranks: a thread for each rank exchanges the rows at the
// borders with its neighbours while its device computes the rows between. Compared with a serial
// run, number by number.

#include "checks.hpp"
#include <troupe/troupe.hpp>

#include <caf/actor_system.hpp>

#include <algorithm>
#include <cstddef>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using snippets::check;
using snippets::must;

namespace {

constexpr std::size_t width = 64;
constexpr std::size_t rows = 16; // of each rank; two more hold the neighbours' rows
constexpr int steps = 50;

/// Computes the rows [first, first + count) of `to`. On GPUs this is a kernel.
void heat(float* to, const float* from, std::size_t first, std::size_t count) {
  for (std::size_t y = first; y < first + count; ++y)
    for (std::size_t x = 1; x + 1 < width; ++x) {
      const auto i = y * width + x;
      to[i] = from[i] +
              0.2f * (from[i - 1] + from[i + 1] + from[i - width] + from[i + width] - 4 * from[i]);
    }
}

// [strip]
/// `count` rows of a plate from row `first` on: a handle to the same memory.
troupe::gpu_ref<float> rows_of(const troupe::gpu_ref<float>& plate, std::size_t first,
                               std::size_t count) {
  auto part = plate.slice(first * width, count * width);
  return part ? *part : troupe::gpu_ref<float>{}; // without memory: requests fail
}

/// Computes `count` rows from row `first` on. Says exactly which rows it reads and writes.
void compute(const troupe::device& on, const troupe::gpu_ref<float>& from,
             const troupe::gpu_ref<float>& to, std::size_t first, std::size_t count) {
  on.launch(
      [=](troupe::launch_context& context) -> caf::error {
        auto input = from.access();
        auto output = to.access();
        if (!input || !output)
          return !input ? input.error() : output.error();
        return context.run_on_host([=, a = *input, b = *output] { heat(b, a, first, count); });
      },
      /* reads */ {rows_of(from, first - 1, count + 2), rows_of(to, first, count)},
      /* writes */ {rows_of(to, first, count)}); // it keeps two columns: so it "reads" them, too
}
// [strip]

// [step]
/// One step of one rank. Row 0 and row `rows` + 1 are copies of the neighbours' rows.
void step(const troupe::world_rank& me, const troupe::gpu_ref<float>& from,
          const troupe::gpu_ref<float>& to) {
  const int above = me.index() - 1;
  const int below = me.index() + 1;
  std::vector<troupe::message_end> sends;
  std::vector<troupe::message_end> recvs;
  if (above >= 0) {
    sends.push_back({above, rows_of(from, 1, 1)});
    recvs.push_back({above, rows_of(from, 0, 1)});
  }
  if (below < static_cast<int>(me.size())) {
    sends.push_back({below, rows_of(from, rows, 1)});
    recvs.push_back({below, rows_of(from, rows + 1, 1)});
  }
  me.exchange(sends, recvs);
  const auto device = me.where();
  compute(device, from, to, 2, rows - 2); // reads no row that the exchange writes: both at once
  compute(device, from, to, 1, 1);        // these two come after the exchange
  compute(device, from, to, rows, 1);
}
// [step]

void run(caf::actor_system& sys) {
  snippets::only_on_host(sys);
  const auto world = must(troupe::world::open(sys, {.devices = troupe::all_devices(sys)}));
  const auto all_rows = world.size() * rows + 2;
  std::vector<float> plate(all_rows * width);
  std::mt19937 random{3};
  std::ranges::generate(plate, [&] { return static_cast<float>(random() % 1000); });

  std::vector<std::vector<float>> results(world.size());
  std::vector<caf::error> errors(world.size());
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < world.size(); ++r)
    threads.emplace_back([&, r] {
      auto& result = results[r];
      auto& error = errors[r];
      const std::vector<float> own(
          plate.begin() + static_cast<std::ptrdiff_t>(r * rows * width),
          plate.begin() + static_cast<std::ptrdiff_t>((r + 1) * rows * width + 2 * width));
      // [rank]
      const auto me = world.rank(r);
      const auto device = me.where();
      auto from = device.allocate<float>((rows + 2) * width);
      auto to = device.allocate<float>((rows + 2) * width);
      if (!from || !to) {
        error = !from ? from.error() : to.error();
        return;
      }
      device.upload(*from, own);
      device.copy(*to, *from); // the edges of the plate never change
      for (int i = 0; i < steps; ++i) {
        step(me, *from, *to); // nothing waits here: the rows order everything
        std::swap(*from, *to);
      }
      result.resize((rows + 2) * width);
      auto done = device.download(*from, result).wait();
      if (!done)
        error = done.error(); // the cause, if any step failed
      // [rank]
    });
  for (auto& thread : threads)
    thread.join();
  for (auto& error : errors)
    must(error);

  auto next = plate;
  for (int i = 0; i < steps; ++i) {
    heat(next.data(), plate.data(), 1, all_rows - 2);
    std::swap(next, plate);
  }
  for (std::size_t r = 0; r < world.size(); ++r)
    check(std::equal(results[r].begin() + width, results[r].end() - width,
                     plate.begin() + static_cast<std::ptrdiff_t>((r * rows + 1) * width)),
          "a row");
}

} // namespace

int main(int argc, char** argv) { return snippets::run_with_devices(argc, argv, run); }
