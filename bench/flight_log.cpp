// Measures the cost of the flight recorder per operation on a lane: the calls that a lane makes for
// an all-reduce in place. Takes the best of many rounds, since other programs may use the machine.

#include "operation/device_state.hpp"
#include "operation/flight_ring.hpp"
#include "operation/operation.hpp"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <memory>
#include <vector>

namespace {

using troupe::detail::clock;

std::int64_t now() { return clock::now().time_since_epoch().count(); }

/// An operation that describes itself as a collective of 8 ranks, for the last rank.
class all_reduce final : public troupe::detail::operation {
public:
  static constexpr std::size_t ranks = 8;

  explicit all_reduce(const std::shared_ptr<troupe::detail::buffer>& memory)
      : operation("all_reduce", ranks) {
    for (std::size_t i = 0; i < ranks; ++i) {
      parts()[i].rank = static_cast<int>(i);
      add_use({memory, 0, memory->size_bytes(), true, true, static_cast<std::uint32_t>(i)});
    }
  }

protected:
  void describe_to(troupe::detail::flight_entry& x,
                   const troupe::detail::part&) const noexcept override {
    x.world = world_;
    x.epoch = 1;
    x.count = 1024;
    x.type = static_cast<std::uint8_t>(troupe::dtype::float32);
  }

private:
  const troupe::detail::world_tag world_ = troupe::detail::make_world_tag("world");
};

/// Returns the best time of `rounds` rounds of `operations` calls of `f`. @units ns per call
template <class F> double best(std::size_t rounds, std::size_t operations, F f) {
  auto result = std::numeric_limits<double>::max();
  for (std::size_t r = 0; r < rounds; ++r) {
    const auto begin = now();
    for (std::size_t i = 0; i < operations; ++i)
      f(i);
    result = std::min(result, static_cast<double>(now() - begin) / static_cast<double>(operations));
  }
  return result;
}

} // namespace

int main(int argc, char** argv) {
  std::size_t rounds = 200;
  std::size_t operations = 10'000;
  bool check = false;
  CLI::App app{"What the flight recorder costs an operation"};
  app.add_option("--rounds", rounds)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--operations", operations, "in a round")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_flag("--check", check, "fail if it is more than 100 ns, or eight looks at the clock");
  CLI11_PARSE(app, argc, argv);

  auto state = std::make_shared<troupe::detail::device_state>(1, 0);
  auto memory = state->make_buffer(nullptr, 4096, [](void*) {});
  std::vector<std::unique_ptr<all_reduce>> all; // as many as a lane has in flight
  for (int i = 0; i < 256; ++i)
    all.push_back(std::make_unique<all_reduce>(memory));
  troupe::detail::flight_log log;
  volatile std::int64_t sink = 0;
  const auto part_of = [&](std::size_t i) -> troupe::detail::part& {
    return all[i % all.size()]->parts().back();
  };
  const auto control = best(rounds, operations, [&](std::size_t i) {
    auto& p = part_of(i);
    p.record = 0;
    sink = p.rank;
  });
  const auto look = best(rounds, operations, [&](std::size_t) { sink = now(); });
  const auto recorded = best(rounds, operations, [&](std::size_t i) {
    auto& p = part_of(i);
    p.record = 0;
    log.issuing(p, 1, now());
    log.issued(p);
    log.started(p, 2); // the lane knows that time anyway
    log.over(p, true, 1, now());
  });
  const auto cost = recorded - control;
  std::printf(
      "flight recorder: %.1f ns per operation, two looks at the clock of %.1f ns included\n", cost,
      look);
  // If the machine is slow at the moment, so is reading the clock.
  if (const auto limit = std::max(100.0, 8 * look); check && cost > limit) {
    std::printf("that is more than %.1f ns\n", limit);
    return 1;
  }
  return 0;
}
