/// Stalls of direct collectives beside calls of CUDA that wait for the device.

#include "support/expect.hpp"
#include "support/gpus.hpp"
#include <troupe/testing/fault_plan.hpp>
#include <troupe/troupe.hpp>

#include <cuda_runtime_api.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

namespace troupe::testing {

namespace {

using namespace std::chrono_literals;
using clock = std::chrono::steady_clock;

class DirectStall : public ::testing::Test {
protected:
  void SetUp() override {
    TROUPE_NEEDS_GPUS(2);
    cfg_ = std::make_unique<config>();
    cfg_->use_backend(with_faults(must(make_cuda_backend()), plan));
    sys_ = std::make_unique<caf::actor_system>(*cfg_);
  }

  world open(std::chrono::milliseconds stall_limit) {
    world_config how{.devices = {0, 1}, .collectives = collectives_policy::direct};
    how.limits.stall_limit = stall_limit;
    return must(world::open(*sys_, how));
  }

  const std::shared_ptr<fault_plan> plan = std::make_shared<fault_plan>();

private:
  std::unique_ptr<config> cfg_;
  std::unique_ptr<caf::actor_system> sys_;
};

/// While a thread frees pinned memory, CUDA waits for the device, and lets nothing be launched on
/// it: a lane cannot leave its call before the kernels of the stalled sum have ended.
TEST_F(DirectStall, EndsWhereLaunchesWaitForItsKernels) {
  auto w = open(300ms);
  auto refs = must(w.allocate<float>(1000));
  auto next = must(w.allocate<float>(1000));
  for (std::size_t rank = 0; rank < w.size(); ++rank) {
    must(w.device_of(rank).fill(refs[rank], 1.0f).wait());
    must(w.device_of(rank).fill(next[rank], 1.0f).wait());
  }
  std::atomic<clock::duration> longest{};
  std::atomic<bool> over{false};
  std::thread frees{[&] {
    EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
    while (!over) {
      void* pinned = nullptr;
      EXPECT_EQ(cudaMallocHost(&pinned, 4096), cudaSuccess);
      const auto begin = clock::now();
      EXPECT_EQ(cudaFreeHost(pinned), cudaSuccess);
      longest = std::max(longest.load(), clock::now() - begin);
    }
  }};
  plan->add({fault::not_issued, verb::collective, 1});
  std::vector<pending<collective_done>> sums;
  const auto end = clock::now() + 200ms; // some of them while the memory is freed
  while (clock::now() < end) {
    sums.push_back(w.all_reduce(refs));
    std::this_thread::sleep_for(1ms);
  }
  for (auto& x : sums)
    EXPECT_TRUE(has_code(x.wait(), errc::stalled));
  const auto right = w.all_reduce(next).wait();
  over = true;
  frees.join();
  must(right);
  EXPECT_GT(longest.load(), 100ms) << "no launch had to wait";
  EXPECT_EQ(w.status().epoch, 2u);
  for (std::size_t rank = 0; rank < w.size(); ++rank)
    EXPECT_EQ(must(w.device_of(rank).download(next[rank])), std::vector<float>(1000, 2));
}

/// The second kernel waits for the fill, and the fill for the first one, which is aborted.
TEST_F(DirectStall, EndsWhereOtherWorkIsBetweenItsKernels) {
  auto w = open(200ms);
  auto refs = must(w.allocate<float>(std::size_t{1} << 20, {true}));
  plan->add({fault::not_issued, verb::collective, 1});
  auto first = w.all_reduce(refs);
  auto between = w.device_of(0).fill(refs[0], 1.0f);
  auto second = w.all_reduce(refs);
  EXPECT_TRUE(has_code(first.wait(), errc::stalled));
  EXPECT_FALSE(second.wait());
  const auto filled = between.wait();
  EXPECT_TRUE(filled || has_code(filled, errc::stalled));
  for (std::size_t rank = 0; rank < w.size(); ++rank)
    must(w.device_of(rank).fill(refs[rank], 1.0f).wait());
  must(w.all_reduce(refs).wait());
  for (std::size_t rank = 0; rank < w.size(); ++rank)
    EXPECT_EQ(must(w.device_of(rank).download(refs[rank])),
              std::vector<float>(std::size_t{1} << 20, 2));
}

} // namespace

} // namespace troupe::testing
