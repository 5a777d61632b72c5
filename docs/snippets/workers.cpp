// Devices in worker processes; a program whose actors run in the workers, beside their devices; and
// device memory that such an actor lends to its parent.

#include "checks.hpp"
#include <troupe/troupe.hpp>

#include <caf/all.hpp>

#include <chrono>
#include <cstddef>
#include <exception>
#include <iostream>
#include <utility>
#include <vector>

using namespace std::chrono_literals;
using snippets::check;
using snippets::must;

namespace {

constexpr std::size_t count = 1000;

caf::error go_on(const troupe::program_place& place) {
  // [keep]
  auto weights = place.keep<float>("weights", count);
  if (!weights)
    return weights.error();
  if (!weights->found) // else an earlier process of this rank has made it
    place.rank.where().fill(weights->ref, 1);
  // [keep]
  auto there = place.rank.where().download(weights->ref);
  if (!there)
    return there.error();
  check(*there == std::vector<float>(count, 1), "the weights");
  return {};
}

// [train]
/// Runs in the worker of one rank, on a thread of its own.
caf::error train(const troupe::program_place& place, caf::blocking_actor* self) {
  auto grads = place.rank.where().allocate<float>(count);
  if (!grads)
    return grads.error();
  place.rank.where().fill(*grads, static_cast<float>(place.rank.index() + 1));
  const troupe::request_options now{.membership = place.rank.status().membership};
  auto sum = place.rank.all_reduce(*grads, now).wait();
  if (!sum)
    return sum.error();
  // [train]
  // [offer]
  auto token = place.rank.where().offer(*grads); // keeps the memory for 10 s, or until the claim
  if (!token)
    return token.error();
  if (auto error = place.report(troupe::to_bytes(*token)))
    return error;
  // [offer]
  if (auto error = go_on(place))
    return error;
  self->receive([](const troupe::program_message&) {}); // keeps the memory until the parent has it
  return {};
}

void check_reports(caf::scoped_actor& self, caf::actor_system& sys, std::size_t ranks) {
  std::size_t reports = 0;
  while (reports < ranks)
    // [claim]
    self->receive(
        [&](const troupe::program_report& report) {
          const auto token = must(troupe::from_bytes<troupe::gpu_token>(report.bytes));
          const auto device = must(troupe::device::open(sys, token.device));
          auto there = device.claim<float>(token); // a handle to read from
          // [claim]
          const auto sum = static_cast<float>(ranks * (ranks + 1) / 2);
          auto source = must(std::move(there));
          check(must(device.download(source)) == std::vector<float>(count, sum),
                "the sum of a program");
          ++reports;
        },
        [](const troupe::program_ended& x) { must(x.why); },
        [](const troupe::world_status& x) {
          check(x.phase != troupe::world_phase::failed, "the world");
        });
}

int report(const caf::error& why) {
  std::cerr << troupe::describe(why) << '\n';
  return 1;
}

int run(int argc, char** argv) {
  // [register]
  auto registered = troupe::register_program("train", [](const troupe::program_place& place) {
    return troupe::spawn_program(place, [place](caf::blocking_actor* self) {
      if (auto why = train(place, self))
        self->fail_state(why); // the parent gets it in `program_ended`
    });
  });
  if (registered)
    return report(registered);
  // [register]
  // [main]
  if (auto status = troupe::worker_main(argc, argv)) // this program is its own worker, too
    return *status;
  troupe::config cfg;
  if (auto error = cfg.parse(argc, argv))
    return report(error);
  cfg.placement = troupe::placement::worker_process; // or --troupe.placement=worker
  caf::actor_system sys{cfg};
  // [main]
  {
    // [world]
    troupe::world_config config;
    config.devices = troupe::all_devices(sys);
    config.limits.standby = troupe::standby_policy::full; // a warm spare for each device
    auto world = troupe::world::open(sys, config);
    // [world]
    const auto w = must(std::move(world));
    const auto refs = must(w.allocate<float>(count));
    w.fill(refs, 1);
    must(w.all_reduce(refs).wait());
    check(must(w.device_of(1).download(refs[1]))[count - 1] == static_cast<float>(w.size()),
          "the sum over workers");
    const auto device = w.device_of(0);
    // [hand_over]
    auto life = device.hand_over().wait(); // its next incarnation, or why it stays where it is
    // [hand_over]
    check(must(std::move(life)) == 2, "the incarnation");
    check(!refs[0].stale(), "the handle");
    const auto sums = must(w.allocate<float>(count));
    // [retries]
    const troupe::request_options again{.deadline = 10s, .max_retries = 5};
    w.fill(refs, 3, again);
    auto sum = w.all_reduce(refs, sums, again).wait(); // a lost worker costs time, and no error
    // [retries]
    must(std::move(sum));
    check(must(w.device_of(0).download(sums[0]))[0] == static_cast<float>(3 * w.size()),
          "the sum of requests that are made again");
  }
  caf::scoped_actor self{sys};
  // [program]
  troupe::world_config config;
  config.devices = troupe::all_devices(sys);
  config.program.name = "train";
  auto world = troupe::world::open(sys, config); // its last copy ends it, and the ranks' actors
  if (!world)
    return report(world.error());
  troupe::tell(self, world->actor(), troupe::subscribe{}); // `self` gets what they report
  // [program]
  check_reports(self, sys, world->size());
  troupe::tell(self, world->actor(), troupe::program_message{});
  std::cout << "every rank's program was right\n";
  return 0;
}

} // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& why) {
    std::cerr << why.what() << '\n';
    return 1;
  }
}
