#ifdef OUTSIDE_WITH_TESTING
#include <troupe/testing/fault_plan.hpp>
#endif
#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iostream>
#include <memory>
#include <vector>

namespace {

constexpr std::size_t count = 1000;

int report(const caf::error& error) {
  std::cerr << troupe::describe(error) << '\n';
  return 1;
}

/// Designated initializers that name only some members must compile without warnings.
[[maybe_unused]] const troupe::failure some_failure{.code = troupe::errc::cancelled};
[[maybe_unused]] const troupe::topology_config some_topology{.verify = true};
[[maybe_unused]] const troupe::mesh_config some_mesh{.chunks = 2};
[[maybe_unused]] const troupe::mesh_options some_options{.deadline = std::chrono::seconds{1}};
[[maybe_unused]] const troupe::all_reduce some_sum{.op = troupe::reduce_op::max};
[[maybe_unused]] const troupe::send_recv some_message{.from = 0, .to = 1};
[[maybe_unused]] const troupe::split some_split{.name = "half", .colors = {0, 1}};
[[maybe_unused]] const troupe::worker_backend_options some_workers{.backend = "host"};
[[maybe_unused]] const troupe::host_agent_options some_agent{.parent = "alpha:1"};

/// Runs an all-reduce over four virtual devices, each with different numbers.
int run(troupe::config& cfg) {
  using namespace std::chrono_literals;
  caf::actor_system sys{cfg};
  auto world = troupe::world::open(sys, {.devices = {0, 1, 2, 3}});
  if (!world)
    return report(world.error());
  auto buffers = world->allocate<std::int64_t>(count);
  if (!buffers)
    return report(buffers.error());
  std::vector<std::int64_t> expected(count);
  for (std::size_t rank = 0; rank < world->size(); ++rank) {
    std::vector<std::int64_t> numbers(count);
    for (std::size_t i = 0; i < count; ++i) {
      numbers[i] = static_cast<std::int64_t>((rank + 1) * 1'000'000 + i * i);
      expected[i] += numbers[i];
    }
    if (auto done = world->device_of(rank).upload((*buffers)[rank], numbers).wait(); !done)
      return report(done.error());
  }
  auto sum = world->all_reduce(*buffers, troupe::reduce_op::sum, {.deadline = 20s});
  if (auto done = sum.wait(); !done)
    return report(done.error());
  for (std::size_t rank = 0; rank < world->size(); ++rank) {
    auto result = world->device_of(rank).download((*buffers)[rank]);
    if (!result)
      return report(result.error());
    if (*result != expected) {
      std::cerr << "rank " << rank << " has wrong elements\n";
      return 1;
    }
  }
  std::cout << "troupe " << troupe::version_string << ": every element right\n";
  return 0;
}

} // namespace

int main() {
  troupe::config cfg;
  auto backend = troupe::make_host_backend({.devices = 4});
#ifdef OUTSIDE_WITH_TESTING
  // The plan has no rules: the test is that the library links.
  auto plan = std::make_shared<troupe::testing::fault_plan>();
  backend = troupe::testing::with_faults(backend, plan);
#endif
  cfg.use_backend(backend);
  return run(cfg);
}
