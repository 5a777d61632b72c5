// Matrix products of programs in worker processes.

#include "worker/program_fixture.hpp"
#include <troupe/blas.hpp>
#include <troupe/bytes.hpp>
#include <troupe/worker_program.hpp>

#include <caf/all.hpp>

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <vector>

namespace troupe::testing {

namespace {

constexpr const char* program_name = "products";
constexpr std::uint64_t n = 16;

/// Multiplies the rank's own matrices, adds the results of all ranks, and checks the sum.
caf::error multiply_and_add(const program_place& place) {
  const auto on = place.rank.where();
  const auto a = on.allocate<float>(n * n);
  const auto b = on.allocate<float>(n * n);
  const auto d = on.allocate<float>(n * n);
  if (!a || !b || !d)
    return make_error(errc::out_of_memory, "no memory for the matrices");
  on.fill(*a, static_cast<float>(place.rank.index() + 1));
  on.fill(*b, 2.0F);
  const auto product = blas::matmul(on, {*a, n, n}, {*b, n, n}, {*d, n, n});
  const auto sum = place.rank.all_reduce(*d);
  if (const auto done = product.wait(); !done)
    return done.error();
  if (const auto done = sum.wait(); !done)
    return done.error();
  const auto got = on.download(*d);
  if (!got)
    return got.error();
  float want = 0;
  for (auto& x : place.rank.status().members)
    want += 2 * n * static_cast<float>(x.rank + 1);
  return *got == std::vector<float>(n * n, want) ? caf::error{}
                                                 : make_error(errc::internal, "a wrong sum");
}

[[maybe_unused]] const bool registered = [] {
  must(register_program(program_name, [](const program_place& place) {
    return place.system.spawn([place](caf::blocking_actor* self) {
      auto why = multiply_and_add(place);
      if (!why)
        why = place.report(to_bytes<std::int32_t>(place.rank.index()));
      if (why)
        self->fail_state(why);
    });
  }));
  return true;
}();

class ProgramWithProducts : public ProgramsTest {};

TEST_F(ProgramWithProducts, MultipliesAndAddsTheResultsOfAllRanks) {
  TROUPE_NEEDS_DEVICES(2);
  start(2, {.name = program_name});
  ASSERT_TRUE(until_more_reports(2));
  std::set<std::int32_t> ranks;
  for (auto& x : reports_)
    ranks.insert(must(from_bytes<std::int32_t>(x.bytes)));
  EXPECT_EQ(ranks, (std::set<std::int32_t>{0, 1}));
}

} // namespace

} // namespace troupe::testing
