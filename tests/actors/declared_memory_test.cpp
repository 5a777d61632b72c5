/// Launches that read or write memory which they have not declared.
#include "support/expect.hpp"
#include "support/world_fixture.hpp"
#include <troupe/troupe.hpp>

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace troupe {

namespace {

using testing::answer_of;
using testing::error_of;
using testing::has_code;
using testing::is_ok;
using testing::must;
using testing::test_system;

class DeclaredMemory : public ::testing::Test {
protected:
  void SetUp() override {
    TROUPE_HOST_ONLY("the launch computes on the host");
    TROUPE_IN_PROCESS_ONLY("callables");
    must(answer_of(d_.fill(a_, 1)));
    must(answer_of(d_.fill(b_, 2)));
  }

  void expect_undeclared(const pending<void>& x) {
    const auto error = error_of(answer_of(x));
    EXPECT_EQ(code_of(error), errc::launch_failed);
    EXPECT_NE(describe(error).find("in none of its lists"), std::string::npos) << describe(error);
  }
  /// Launches work that accesses `x` while it is enqueued.
  pending<void> launch(const any_gpu_ref& x, std::vector<any_gpu_ref> reads,
                       std::vector<any_gpu_ref> writes) {
    return d_.launch(
        [x](launch_context&) -> caf::error {
          auto memory = x.access();
          return memory ? caf::error{} : memory.error();
        },
        std::move(reads), std::move(writes));
  }
  /// Launches work that accesses `x` when its turn has come.
  pending<void> launch_on_host(const any_gpu_ref& x, std::vector<any_gpu_ref> reads,
                               std::vector<any_gpu_ref> writes) {
    return d_.launch([x](launch_context& on) { return on.run_on_host([x] { must(x.access()); }); },
                     std::move(reads), std::move(writes));
  }

  test_system system_{{.devices = 1}};
  device d_ = system_.open();
  gpu_ref<std::int32_t> a_ = must(d_.allocate<std::int32_t>(8));
  gpu_ref<std::int32_t> b_ = must(d_.allocate<std::int32_t>(8));
};

TEST_F(DeclaredMemory, IsAccessible) {
  EXPECT_TRUE(is_ok(answer_of(launch(a_, {a_}, {}))));
  EXPECT_TRUE(is_ok(answer_of(launch(b_, {a_}, {b_}))));
  EXPECT_TRUE(is_ok(answer_of(launch_on_host(a_, {a_}, {b_}))));
  EXPECT_TRUE(is_ok(answer_of(launch_on_host(b_, {a_}, {b_}))));
  const auto part = must(a_.slice(2, 3));
  EXPECT_TRUE(is_ok(answer_of(launch(part, {a_}, {}))));
  EXPECT_TRUE(is_ok(answer_of(launch_on_host(part, {a_}, {}))));
}

TEST_F(DeclaredMemory, AnotherBufferIsRefused) {
  expect_undeclared(launch(b_, {a_}, {}));
  expect_undeclared(launch(b_, {}, {}));
  expect_undeclared(launch_on_host(b_, {a_}, {}));
  expect_undeclared(launch_on_host(b_, {}, {}));
  EXPECT_EQ(must(d_.download(b_)), std::vector<std::int32_t>(8, 2)) << "nothing is lost";
}

// A launch that declares parts may take the address of the whole.
TEST_F(DeclaredMemory, APartDeclaresItsBuffer) {
  const auto part = must(a_.slice(0, 4));
  EXPECT_TRUE(is_ok(answer_of(launch(a_, {part}, {}))));
  EXPECT_TRUE(is_ok(answer_of(launch_on_host(a_, {part}, {}))));
}

TEST_F(DeclaredMemory, AccessOutsideOfLaunchesIsFree) {
  EXPECT_TRUE(is_ok(answer_of(launch(a_, {a_}, {}))));
  EXPECT_TRUE(a_.access());
  EXPECT_TRUE(b_.access());
}

} // namespace

} // namespace troupe
