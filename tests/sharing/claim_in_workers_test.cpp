// Memory leases between a parent and its workers on the same host.

#include "sharing/claim_fixture.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

namespace troupe::testing {

namespace {

class here final : public claim_place {
public:
  system_options system(int devices) override { return in_worker_processes(devices); }
  int first() const noexcept override { return 0; }
};

INSTANTIATE_TEST_SUITE_P(Workers, Claim,
                         ::testing::Values(claim_place_kind{
                             "here", [] { return std::make_unique<here>(); }}),
                         [](const auto& x) { return x.param.name; });

/// Other devices reach a program's memory, where it is.
TEST_F(ClaimTest, IsForDirectCollectives) {
  TROUPE_NEEDS_DEVICES(2);
  begin(in_worker_processes(2), 0);
  ASSERT_EQ(claim(theirs(3)), caf::error{});
  const auto w = system_->open_world({.collectives = collectives_policy::direct});
  auto own = must(w.allocate<float>(ref_.count()));
  must(answer_of(w.fill(own, 4.0f)));
  auto to = must(w.allocate<float>(ref_.count()));
  const std::vector<any_gpu_ref> from{ref_, own[1]};
  EXPECT_TRUE(is_ok(answer_of(w.all_reduce(from, any(to), reduce_op::sum))));
  for (int rank : {0, 1})
    EXPECT_TRUE(holds(system_->open(rank), to[rank], std::vector<float>(ref_.count(), 7)));
  EXPECT_EQ(value(), 3);
}

TEST(ClaimWithoutPrograms, IsRefused) {
  test_system system{in_worker_processes(1)};
  auto d = system.open();
  EXPECT_TRUE(has_code(answer_of(d.claim({.node = 1, .device = 0, .buffer = 1, .generation = 1})),
                       errc::stale_ref));
}

} // namespace

} // namespace troupe::testing
