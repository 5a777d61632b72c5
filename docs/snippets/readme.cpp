#include <troupe/troupe.hpp>

#include <caf/actor_system.hpp>

#include <chrono>
#include <iostream>

using namespace std::chrono_literals;

int fail(const caf::error& why) {
  std::cerr << troupe::describe(why) << '\n';
  return 1;
}

int main(int argc, char** argv) {
  troupe::config cfg; // a CAF configuration that knows troupe's messages and options
  if (auto error = cfg.parse(argc, argv))
    return fail(error);
  if (cfg.help_printed()) // --help
    return 0;
  caf::actor_system sys{cfg};
  auto world = troupe::world::open(sys, {.devices = troupe::all_devices(sys)});
  if (!world)
    return fail(world.error());
  auto grads = world->allocate<float>(1 << 24); // one handle per rank
  if (!grads)
    return fail(grads.error());
  world->fill(*grads, 1.0f); // no wait: the sum is ordered after it
  auto sum = world->all_reduce(*grads, {.deadline = 2s});
  if (auto done = sum.wait(); !done)
    return fail(done.error());
  std::cout << "every element of each rank is " << world->size() << '\n';
}
