/// Devices without free memory, in one process and in workers.

#include "support/affine_kernel.hpp"
#include "support/eventually.hpp"
#include "support/expect.hpp"
#include "support/full_device.hpp"
#include "support/gpus.hpp"
#include "support/log_lines.hpp"
#include "support/parsed_config.hpp"
#include <troupe/troupe.hpp>

#include <caf/actor_system.hpp>

#include <cuda_runtime_api.h>

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace troupe::testing {

namespace {

using namespace std::chrono_literals;

constexpr std::size_t mib = std::size_t{1} << 20;

class FullDevice : public ::testing::TestWithParam<const char*> {
protected:
  void SetUp() override { TROUPE_NEEDS_GPUS(1); }

  std::vector<std::string> options() const {
    return {"--troupe.backend=cuda", std::string{"--troupe.placement="} + GetParam()};
  }
};

/// The option reaches the process of the device.
TEST_P(FullDevice, IsEmptySomeTimeAfterTheLastHandle) {
  auto all = options();
  all.push_back("--troupe.keep-freed=300");
  parsed_config cfg{all};
  caf::actor_system sys{cfg};
  auto gpu = must(device::open(sys, 0));
  must(gpu.fill(must(gpu.allocate<std::uint8_t>(1024)), std::uint8_t{1}).wait());
  const auto before = free_bytes_of_device(0);
  const auto size = before / 10 * 7;
  {
    auto x = must(gpu.allocate<std::uint8_t>(size));
    must(gpu.fill(x, std::uint8_t{1}).wait());
    EXPECT_LT(free_bytes_of_device(0) + size / 2, before);
  }
  EXPECT_TRUE(eventually([&] { return free_bytes_of_device(0) + 64 * mib >= before; }, 10s));
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, before / 10 * 6), cudaSuccess) << "another library has room";
  EXPECT_TRUE(has_code(gpu.allocate<std::uint8_t>(size), errc::out_of_memory));
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
  must(gpu.fill(must(gpu.allocate<std::uint8_t>(size)), std::uint8_t{2}).wait());
}

/// A new world on a full device fails with the reason. An existing world continues.
TEST_P(FullDevice, HasNoRoomForAnotherWorld) {
  TROUPE_NEEDS_GPUS(2);
  parsed_config cfg{options()};
  caf::actor_system sys{cfg};
  world_config wanted{.devices = {0, 1}, .collectives = collectives_policy::nccl};
  auto first = must(world::open(sys, wanted));
  auto x = must(first.allocate<float>(1 << 20, true));
  must(first.all_reduce(x).wait());
  {
    full_device full{0, 16 * mib};
    const auto begin = std::chrono::steady_clock::now();
    wanted.limits.build_deadline = 20s;
    wanted.limits.restarts = 2;
    const auto second = world::open(sys, wanted);
    EXPECT_TRUE(has_code(second, errc::out_of_memory));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 60s);
    must(first.all_reduce(x, reduce_op::max, {.deadline = 20s}).wait());
    EXPECT_TRUE(has_code(first.allocate<float>(std::size_t{1} << 30), errc::out_of_memory));
  }
  auto third = must(world::open(sys, wanted));
  auto z = must(third.allocate<float>(1 << 20, true));
  must(third.all_reduce(z).wait());
}

INSTANTIATE_TEST_SUITE_P(In, FullDevice, ::testing::Values("in_process", "worker"),
                         [](const auto& x) {
                           return std::string{x.param} == "worker" ? "Workers" : "OneProcess";
                         });

/// A CUDA error that a callable ignores does not fail later launches.
TEST(LeftError, FailsNoLaunch) {
  TROUPE_NEEDS_GPUS(1);
  log_lines log;
  parsed_config cfg{{"--troupe.backend=cuda"}};
  caf::actor_system sys{cfg};
  auto gpu = must(device::open(sys, 0));
  constexpr std::size_t count = 1000;
  auto x = must(gpu.allocate<std::uint32_t>(count));
  auto y = must(gpu.allocate<std::uint32_t>(count));
  gpu.fill(x, 1u);
  gpu.fill(y, 1u);
  std::uint32_t want = 1;
  std::atomic<int> unclean{0};
  for (int i = 0; i < 20; ++i) {
    const bool of_memory = i % 2 == 0;
    must(gpu.launch(
                [of_memory](launch_context&) -> caf::error {
                  int local = 0;
                  static_cast<void>(of_memory ? cudaFree(&local) : cudaSetDevice(9999));
                  return {}; // ignored
                },
                {}, {})
             .wait());
    must(gpu.launch(
                [&, x, y](launch_context& context) -> caf::error {
                  if (cudaPeekAtLastError() != cudaSuccess)
                    ++unclean;
                  return launch_affine(must(x.access()), must(y.access()), 3, count,
                                       context.cuda_stream()) == 0
                             ? caf::error{}
                             : make_error(errc::cuda_error, "the kernel was not launched");
                },
                {x, y}, {x})
             .wait());
    want = 3 * want + 1;
  }
  EXPECT_EQ(unclean, 0);
  EXPECT_EQ(must(gpu.download(x)), std::vector<std::uint32_t>(count, want));
  EXPECT_TRUE(log.say("invalid device ordinal"));
  EXPECT_TRUE(log.say("invalid argument"));
  EXPECT_LE(log.count(), 4u) << "a line for each launch";
}

} // namespace

} // namespace troupe::testing
