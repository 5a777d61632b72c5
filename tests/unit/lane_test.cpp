/// Lanes: order, bounds, life.
#include "support/core_fixture.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace troupe {

namespace {

using testing::allocate_bytes;
using testing::answer_of;
using testing::borrow;
using testing::core_system;
using testing::fault;
using testing::fault_plan;
using testing::gate;
using testing::has_code;
using testing::is_ok;
using testing::verb;
using namespace std::chrono_literals;

// INV-12: nothing that a lane lets go is a success.
TEST(Lane, FailsAllThatAFaultLetsGo) {
  for (int round = 0; round < 300; ++round) {
    auto plan = std::make_shared<fault_plan>();
    core_system system{{.devices = 2, .plan = plan}};
    std::vector<std::shared_ptr<detail::completion>> answers;
    std::vector<std::unique_ptr<gate>> gates;
    for (int i = 0; i < 2; ++i) {
      auto device = system.device(i);
      gates.push_back(std::make_unique<gate>());
      auto memory = allocate_bytes(device, 8);
      for (int n = 0; n < 50; ++n)
        answers.push_back(device.launch(gates.back()->in_stream(), {}, {memory}, {}));
    }
    for (auto& x : gates)
      x->wait_reached();
    plan->poison();
    for (auto& x : answers)
      ASSERT_TRUE(has_code(answer_of(x), errc::device_fault)) << "round " << round;
    for (auto& x : gates)
      x->open();
  }
}

} // namespace

} // namespace troupe
