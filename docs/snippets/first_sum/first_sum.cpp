#include <troupe/troupe.hpp>

#include <caf/actor_system.hpp>

#include <chrono>
#include <cstddef>
#include <iostream>
#include <utility>
#include <vector>

using namespace std::chrono_literals;

/// Sums 1, 2, ..., n over the ranks of a world, and checks every element.
caf::error first_sum(caf::actor_system& sys) {
  // [open]
  auto world = troupe::world::open(sys, {.devices = troupe::all_devices(sys)});
  if (!world)
    return world.error();
  const auto n = world->size(); // the number of ranks: one for each device
  // [open]

  // [memory]
  auto data = world->allocate<float>(1000); // a vector of gpu_ref<float>, one per rank
  if (!data)
    return data.error();
  std::vector<std::vector<float>> numbers; // for each rank
  for (std::size_t rank = 0; rank < n; ++rank)
    numbers.emplace_back(1000, static_cast<float>(rank + 1));
  world->upload(*data, std::move(numbers)); // returns at once
  // [memory]

  // [sum]
  auto sum = world->all_reduce(*data, {.deadline = 2s}); // after the uploads
  if (auto done = sum.wait(); !done)
    return done.error();
  // [sum]

  // [check]
  auto results = world->download(*data); // a std::vector<float> for each rank
  if (!results)
    return results.error();
  for (const auto& result : *results)
    for (float x : result)
      if (x != static_cast<float>(n * (n + 1) / 2))
        return troupe::make_error(troupe::errc::internal, "a wrong element");
  std::cout << n << " ranks, every element right\n";
  // [check]
  return {};
}

int main(int argc, char** argv) {
  troupe::config cfg;
  auto error = cfg.parse(argc, argv);
  if (!error && !cfg.help_printed()) {
    caf::actor_system sys{cfg};
    error = first_sum(sys);
  }
  if (error) {
    std::cerr << troupe::describe(error) << '\n';
    return 1;
  }
  return 0;
}
