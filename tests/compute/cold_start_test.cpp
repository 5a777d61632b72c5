/// The first products of a process, while other ranks already wait in a collective. Environment:
/// TROUPE_COLD_STARTS (number of processes).

#include "support/child_process.hpp"
#include "support/world_fixture.hpp"
#include <troupe/blas.hpp>

#include <chrono>
#include <cmath>
#include <complex>
#include <cstddef>
#include <cstdlib>
#include <deque>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

constexpr std::size_t n = 64;
constexpr std::chrono::seconds child_limit{60};
constexpr std::size_t at_once = 8; ///< processes that run at a time

std::size_t processes() {
  const char* wanted = std::getenv("TROUPE_COLD_STARTS");
  return wanted != nullptr ? static_cast<std::size_t>(std::atoi(wanted)) : 2;
}

/// Returns a matrix whose elements are one.
blas::matrix ones(const device& on, scalar one) {
  auto memory = must(on.allocate(one.type(), n * n).wait());
  must(answer_of(on.fill(memory, one)));
  return {memory, n, n};
}

/// Each kind of product is the first one of its kind, on one rank after the other. The collective
/// comes to the other ranks' devices while the code of the product is loaded.
TROUPE_CHILD(multiply_cold) {
  test_system system{{.devices = 2}};
  const auto world = system.open_world();
  const auto refs = must(world.allocate(dtype::float32, 1024));
  const scalar kinds[] = {scalar{bfloat16{1.0F}}, scalar{1.0F}, scalar{float16{1.0F}}, scalar{1.0},
                          scalar{std::complex<float>{1.0F}}};
  std::vector<std::pair<blas::matrix, blas::matrix>> operands;
  for (std::size_t i = 0; i < std::size(kinds); ++i) {
    const auto on = world.device_of(i % world.size());
    operands.emplace_back(ones(on, kinds[i]), ones(on, kinds[i]));
  }
  for (std::size_t rank = 0; rank < world.size(); ++rank)
    must(answer_of(world.device_of(rank).fill(refs[rank], scalar{1.0F})));
  std::vector<pending<void>> products;
  std::vector<pending<collective_done>> sums;
  for (std::size_t i = 0; i < std::size(kinds); ++i) {
    const auto& [a, d] = operands[i];
    products.push_back(blas::matmul(world.device_of(i % world.size()), a, a, d));
    sums.push_back(world.all_reduce(refs));
  }
  for (auto& x : products)
    must(answer_of(x));
  for (auto& x : sums)
    must(answer_of(x));
  const auto sum = std::pow(static_cast<float>(world.size()), static_cast<float>(sums.size()));
  for (std::size_t rank = 0; rank < world.size(); ++rank)
    if (!holds(world.device_of(rank), refs[rank], std::vector<float>(1024, sum)))
      return 1;
  const auto& first = operands[0].second.memory;
  return holds(world.device_of(0), first,
               std::vector<bfloat16>(n * n, bfloat16{static_cast<float>(n)}))
             ? 0
             : 2;
}

TEST(ColdStart, OfProductsHoldsUpNoCollective) {
  TROUPE_NEEDS_DEVICES(2);
  std::deque<std::unique_ptr<running_child>> running;
  std::size_t begun = 0;
  for (std::size_t ended = 0; ended < processes(); ++ended) {
    for (; begun < processes() && running.size() < at_once; ++begun)
      running.push_back(std::make_unique<running_child>("multiply_cold"));
    const auto end = running.front()->wait(child_limit);
    running.pop_front();
    ASSERT_TRUE(end.in_time && end.status == 0) << to_string(end);
  }
}

} // namespace

} // namespace troupe::testing
