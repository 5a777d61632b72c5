// Memory leases between a parent and its workers on the same host.

#include "sharing/claim_fixture.hpp"

#include <gtest/gtest.h>

#include <memory>

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

TEST(ClaimWithoutPrograms, IsRefused) {
  test_system system{in_worker_processes(1)};
  auto d = system.open();
  EXPECT_TRUE(has_code(answer_of(d.claim({.node = 1, .device = 0, .buffer = 1, .generation = 1})),
                       errc::stale_ref));
}

} // namespace

} // namespace troupe::testing
