// Tests of a program without GPUs, and with faults on demand.

#include <troupe/testing/fault_plan.hpp>
#include <troupe/troupe.hpp>

#include <caf/actor_system.hpp>

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

using namespace std::chrono_literals;

namespace {

// [virtual]
TEST(MySums, AreRightOnFourVirtualDevices) {
  troupe::config cfg;
  cfg.use_backend(troupe::make_host_backend({.devices = 4}));
  caf::actor_system sys{cfg};
  auto world = troupe::world::open(sys, {.devices = troupe::all_devices(sys)});
  ASSERT_TRUE(world) << troupe::describe(world.error());
  auto data = world->allocate<std::int32_t>(1000);
  ASSERT_TRUE(data) << troupe::describe(data.error());
  for (std::size_t rank = 0; rank < world->size(); ++rank)
    world->device_of(rank).fill((*data)[rank], static_cast<std::int32_t>(rank));
  world->all_reduce(*data);
  auto results = world->download(*data);
  ASSERT_TRUE(results) << troupe::describe(results.error());
  for (auto& result : *results)
    EXPECT_EQ(result, std::vector<std::int32_t>(1000, 0 + 1 + 2 + 3));
}
// [virtual]

// [faults]
TEST(MySums, GoOnAfterARankStoodStill) {
  using namespace troupe::testing;
  auto plan = std::make_shared<fault_plan>(); // no rules yet: nothing happens
  troupe::config cfg;
  cfg.use_backend(with_faults(troupe::make_host_backend({.devices = 3}), plan));
  caf::actor_system sys{cfg};
  troupe::world_config config;
  config.devices = troupe::all_devices(sys);
  config.limits.stall_limit = 100ms;
  auto world = troupe::world::open(sys, config);
  ASSERT_TRUE(world) << troupe::describe(world.error());
  auto data = world->allocate<float>(1000, /* zeroed */ true);
  ASSERT_TRUE(data) << troupe::describe(data.error());

  // The next collective of device 2 never begins.
  plan->add({.kind = fault::not_issued, .on = verb::collective, .device = 2});
  auto stalled = world->all_reduce(*data).wait();
  ASSERT_FALSE(stalled);
  EXPECT_EQ(troupe::code_of(stalled.error()), troupe::errc::stalled);
  EXPECT_EQ(plan->injected(), 1u);

  // The memory is indeterminate until it is overwritten; the world has another communicator.
  auto unreadable = world->device_of(0).download((*data)[0]);
  EXPECT_EQ(troupe::code_of(unreadable.error()), troupe::errc::indeterminate);
  world->fill(*data, 1);
  auto again = world->all_reduce(*data).wait();
  EXPECT_TRUE(again) << troupe::describe(again.error());
  EXPECT_EQ(world->status().epoch, 2u);
}
// [faults]

// [reset]
TEST(MySums, SayWhenADeviceHasLostItsMemory) {
  troupe::config cfg;
  cfg.use_backend(troupe::make_host_backend({.devices = 1}));
  caf::actor_system sys{cfg};
  auto device = troupe::device::open(sys, 0);
  ASSERT_TRUE(device) << troupe::describe(device.error());
  auto memory = device->allocate<float>(10, true);
  ASSERT_TRUE(memory) << troupe::describe(memory.error());
  auto generation = device->reset().wait(); // or, in a worker process, a launch that ends it
  ASSERT_TRUE(generation) << troupe::describe(generation.error());
  EXPECT_EQ(*generation, 2u);
  EXPECT_TRUE(memory->stale());
  auto unreadable = device->download(*memory);
  EXPECT_EQ(troupe::code_of(unreadable.error()), troupe::errc::stale_ref);
}
// [reset]

} // namespace
