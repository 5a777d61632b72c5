/// Memory on its way to another process: indeterminate ranges stay indeterminate.
#include "operation/admission_lock.hpp"
#include "operation/buffer.hpp"
#include "sharing/lend_operation.hpp"
#include "support/core_fixture.hpp"
#include <troupe/testing/fault_plan.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace troupe {

namespace {

using detail::lend_operation;
using detail::memory_lease;

using testing::allocate_bytes;
using testing::answer_of;
using testing::borrow;
using testing::core_system;
using testing::eventually;
using testing::failing_work;
using testing::fault;
using testing::fault_plan;
using testing::gate;
using testing::has_code;
using testing::is_ok;
using testing::must;
using testing::same_bytes;
using testing::settles;
using testing::verb;

constexpr std::size_t size = 64;

std::shared_ptr<lend_operation> lend(const core_system& system, const any_gpu_ref& memory,
                                     access_mode mode) {
  auto result = std::make_shared<lend_operation>("claim", memory, mode);
  result->parts()[0].on = system.lane().get();
  result->deadline = detail::clock::now() + testing::patience;
  system.runtime()->start(result);
  return result;
}

/// Checks as the next admitted operation would: an operation settles under the admission lock.
caf::error check_determinate(const any_gpu_ref& memory, std::size_t begin, std::size_t end) {
  detail::admission_lock lock;
  return memory.memory()->check_determinate(begin, end);
}

/// Blocks the lane until let_go() is called.
class held_up {
public:
  explicit held_up(const core_system& system)
      : last_(system.device().launch(gate_.on_lane(), {}, {}, {})) {
    gate_.wait_reached();
  }
  void let_go() {
    gate_.open();
    EXPECT_TRUE(is_ok(answer_of(last_)));
  }

private:
  gate gate_;
  std::shared_ptr<detail::completion> last_;
};

TEST(LendOperation, TellsWhatIsHalfWrittenOfThePart) {
  core_system system;
  auto memory = allocate_bytes(system.device(), size);
  memory.memory()->mark({8, 24, make_error(errc::launch_failed, "on purpose")});
  const auto lent = lend(system, must(memory.slice(16, 16)), access_mode::write);
  ASSERT_TRUE(is_ok(answer_of(lent)));
  ASSERT_EQ(lent->unreadable().size(), 1u);
  EXPECT_EQ(lent->unreadable()[0].begin, 16u);
  EXPECT_EQ(lent->unreadable()[0].end, 24u);
  EXPECT_TRUE(has_code(lent->unreadable()[0].cause, errc::launch_failed));
  EXPECT_TRUE(has_code(check_determinate(memory, 8, 16), errc::indeterminate));
  EXPECT_TRUE(has_code(check_determinate(memory, 16, 24), errc::indeterminate));
}

TEST(LendOperation, TellsWhatAWriterBeforeItLeavesHalfWritten) {
  core_system system;
  const auto memory = allocate_bytes(system.device(), size);
  held_up lane{system};
  auto writer = system.device().launch(failing_work(), {}, {must(memory.slice(4, 8))}, {});
  const auto lent = lend(system, memory, access_mode::write); // the writer has not failed yet
  lane.let_go();
  EXPECT_TRUE(has_code(answer_of(writer), errc::launch_failed));
  ASSERT_TRUE(is_ok(answer_of(lent)));
  ASSERT_EQ(lent->unreadable().size(), 1u);
  EXPECT_EQ(lent->unreadable()[0].begin, 4u);
  EXPECT_EQ(lent->unreadable()[0].end, 12u);
  EXPECT_TRUE(has_code(check_determinate(memory, 0, size), errc::indeterminate));
  EXPECT_TRUE(is_ok(check_determinate(memory, 12, size)));
}

TEST(LendOperation, ToReadFailsBehindAWriterThatFails) {
  core_system system;
  for (auto mode : {access_mode::read, access_mode::read_write}) {
    const auto memory = allocate_bytes(system.device(), size);
    held_up lane{system};
    auto writer = system.device().launch(failing_work(), {}, {memory}, {});
    const auto lent = lend(system, memory, mode);
    lane.let_go();
    EXPECT_TRUE(has_code(answer_of(writer), errc::launch_failed));
    EXPECT_TRUE(has_code(answer_of(lent), errc::launch_failed));
    ASSERT_TRUE(settles(*lent));
    EXPECT_TRUE(has_code(check_determinate(memory, 0, size), errc::indeterminate));
  }
}

TEST(LendOperation, HoldsUpNobodyWhoAllocates) {
  core_system system;
  const auto memory = allocate_bytes(system.device(), size);
  gate kernel;
  auto writer = system.device().launch(kernel.in_stream(), {}, {memory}, {});
  kernel.wait_reached();
  std::vector<std::byte> bytes(size);
  auto download = system.device().download(memory, borrow(bytes), {});
  const auto lent = lend(system, memory, access_mode::read);
  allocate_bytes(system.device(), size);
  EXPECT_FALSE(lent->completed());
  kernel.open();
  EXPECT_TRUE(is_ok(answer_of(writer)));
  EXPECT_TRUE(is_ok(answer_of(download)));
  EXPECT_TRUE(is_ok(answer_of(lent)));
}

TEST(LendOperation, OfWhatNobodyUsesWaitsForNoOther) {
  core_system system;
  const auto busy = allocate_bytes(system.device(), size);
  const auto idle = allocate_bytes(system.device(), size);
  gate kernel;
  auto writer = system.device().launch(kernel.in_stream(), {}, {busy}, {});
  kernel.wait_reached();
  const auto first = lend(system, busy, access_mode::read);
  const auto again = lend(system, busy, access_mode::read);
  EXPECT_TRUE(is_ok(answer_of(lend(system, idle, access_mode::write))));
  EXPECT_FALSE(first->completed());
  EXPECT_FALSE(again->completed());
  kernel.open();
  EXPECT_TRUE(is_ok(answer_of(writer)));
  EXPECT_TRUE(is_ok(answer_of(first)));
  EXPECT_TRUE(is_ok(answer_of(again)));
}

TEST(LendOperation, WithoutAStreamFailsAndLeavesNothing) {
  const auto plan = std::make_shared<fault_plan>();
  core_system system{{.plan = plan}};
  const auto memory = allocate_bytes(system.device(), size);
  gate kernel;
  auto writer = system.device().launch(kernel.in_stream(), {}, {memory}, {});
  kernel.wait_reached();
  plan->add({.kind = fault::fail, .on = verb::create_stream, .error = errc::cuda_error});
  const auto lent = lend(system, memory, access_mode::write);
  EXPECT_TRUE(has_code(answer_of(lent), errc::cuda_error));
  allocate_bytes(system.device(), size);
  kernel.open();
  EXPECT_TRUE(is_ok(answer_of(writer)));
  ASSERT_TRUE(settles(*lent));
  EXPECT_TRUE(eventually([&] { // until the memory is returned
    return is_ok(answer_of(lend(system, memory, access_mode::write)));
  }));
  EXPECT_EQ(system.lane()->in_flight(), 0u);
}

TEST(LendOperation, ThatIsTakenBackLeavesWhatItWas) {
  core_system system;
  const auto memory = allocate_bytes(system.device(), size);
  memory.memory()->mark({8, 24, make_error(errc::launch_failed, "on purpose")});
  held_up lane{system};
  const auto lent = lend(system, memory, access_mode::write);
  lent->cancel();
  EXPECT_TRUE(has_code(answer_of(lent), errc::cancelled));
  lane.let_go();
  ASSERT_TRUE(settles(*lent));
  EXPECT_TRUE(has_code(check_determinate(memory, 8, 24), errc::indeterminate));
  EXPECT_TRUE(is_ok(check_determinate(memory, 24, size)));
  EXPECT_TRUE(eventually([&] { // until the memory is returned
    return is_ok(answer_of(lend(system, memory, access_mode::write)));
  }));
}

TEST(LendOperation, LeavesItToTheOtherProcessUntilTheLeaseGoes) {
  core_system system;
  const auto memory = allocate_bytes(system.device(), size);
  const auto fill = [&] { return answer_of(system.device().fill(memory, same_bytes(memory), {})); };
  for (auto mode : {access_mode::read, access_mode::write, access_mode::read_write}) {
    const auto lent = lend(system, memory, mode);
    ASSERT_TRUE(is_ok(answer_of(lent)));
    {
      const memory_lease lease{lent->ref().memory(), lent->mode()};
      EXPECT_TRUE(has_code(fill(), errc::buffer_acquired));
      const auto again = lend(system, memory, access_mode::read);
      if (mode == access_mode::read) {
        EXPECT_TRUE(is_ok(answer_of(again)));
        const memory_lease other{again->ref().memory(), again->mode()};
      } else {
        EXPECT_TRUE(has_code(answer_of(again), errc::buffer_acquired));
      }
    }
    EXPECT_TRUE(is_ok(fill()));
  }
}

} // namespace

} // namespace troupe
