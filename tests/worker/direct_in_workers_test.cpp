// Direct collectives between devices in worker processes.

#include "support/eventually.hpp"
#include "support/worker_losses.hpp"
#include <troupe/worker.hpp>

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

constexpr std::size_t count = 1000;

class DirectInWorkers : public ::testing::Test {
protected:
  world& start(standby_policy standby = standby_policy::none,
               loss_policy on_loss = loss_policy::automatic) {
    system_.emplace(in_worker_processes(on_cuda() ? 2 : 3));
    world_config config;
    config.collectives = collectives_policy::direct;
    config.limits.standby = standby;
    config.limits.on_loss = on_loss;
    config.limits.restarts = 1000;
    config.limits.restart_backoff = backoff_;
    world_.emplace(system_->open_world(config));
    feed_.emplace(*system_, world_->actor());
    return *world_;
  }

  std::chrono::milliseconds backoff_ = world_limits{}.restart_backoff; ///< set before `start`

  world_status until_prepared(std::uint64_t from_epoch = 0) {
    return feed_->until([=](const world_status& x) {
      return x.phase == world_phase::ready && x.standby_ready && x.epoch >= from_epoch;
    });
  }

  /// For EXPECT_TRUE: a sum goes direct, and is right on all ranks. `elements`: of each buffer
  ::testing::AssertionResult sums(std::size_t elements = count) {
    auto data = must(world_->allocate<std::uint32_t>(elements));
    std::uint32_t want = 0;
    for (std::uint32_t i = 0; i < world_->size(); ++i) {
      want += i + 1;
      must(answer_of(world_->device_of(i).fill(data[i], i + 1)));
    }
    const auto done = answer_of(world_->all_reduce(data, reduce_op::sum));
    if (!done)
      return ::testing::AssertionFailure() << describe(done.error());
    if (done->way != collective_way::direct)
      return ::testing::AssertionFailure() << "it went by NCCL";
    for (std::size_t i = 0; i < world_->size(); ++i)
      if (auto right =
              holds(world_->device_of(i), data[i], std::vector<std::uint32_t>(elements, want));
          !right)
        return right;
    return ::testing::AssertionSuccess();
  }

  std::optional<test_system> system_;
  std::optional<world> world_;
  std::optional<world_feed> feed_;
};

TEST_F(DirectInWorkers, AreTheDefault) {
  TROUPE_NEEDS_DEVICES(2);
  system_.emplace(in_worker_processes(3));
  world_.emplace(must(world::open(*system_, {.devices = system_->ordinals()})));
  EXPECT_TRUE(sums());
  EXPECT_TRUE(sums(5'000'000)); // in one process, NCCL may do it
}

TEST_F(DirectInWorkers, SumBuffersOfEachSize) {
  TROUPE_NEEDS_DEVICES(2);
  start();
  for (const auto elements : {1, 2, 1000, 65'537, 300'000, 5'000'000})
    EXPECT_TRUE(sums(static_cast<std::size_t>(elements))) << elements;
}

/// Other workers map a slab before memory of it is given out.
TEST_F(DirectInWorkers, UseMemoryThatAppearsLater) {
  TROUPE_NEEDS_DEVICES(2);
  auto& w = start(standby_policy::full);
  until_prepared();
  std::vector<gpu_ref<std::uint32_t>> held; // so that each sum needs another slab
  for (int round = 0; round < 4; ++round) {
    EXPECT_TRUE(sums(std::size_t{20} << 20));
    for (std::size_t i = 0; i < w.size(); ++i)
      held.push_back(must(w.device_of(i).allocate<std::uint32_t>(std::size_t{16} << 20)));
  }
}

/// A spare has mapped the memory of the other devices, also what appeared after its start.
TEST_F(DirectInWorkers, GoOnWithSpares) {
  TROUPE_NEEDS_DEVICES(2);
  backoff_ = std::chrono::hours{1}; // a standby is not a restart that has to wait
  auto& w = start(standby_policy::full);
  std::uint64_t epoch = 0;
  std::vector<gpu_ref<std::uint32_t>> held;
  for (std::size_t round = 0; round < 4; ++round) {
    const auto before = until_prepared(epoch);
    epoch = before.epoch + 1;
    for (std::size_t i = 0; i < w.size(); ++i)
      held.push_back(must(w.device_of(i).allocate<std::uint32_t>(std::size_t{16} << 20)));
    auto data = must(w.allocate<std::uint32_t>(std::size_t{1} << 20)); // in the new slabs
    for (std::size_t i = 0; i < w.size(); ++i)
      must(answer_of(w.device_of(i).fill(data[i], 1u)));
    spare_takes_over(w, *feed_, round % w.size(), before);
    const auto done = must(answer_of(w.all_reduce(data, reduce_op::sum)));
    EXPECT_EQ(done.way, collective_way::direct);
    const std::vector<std::uint32_t> want(data[0].count(), static_cast<std::uint32_t>(w.size()));
    for (std::size_t i = 0; i < w.size(); ++i)
      EXPECT_TRUE(holds(w.device_of(i), data[i], want));
    EXPECT_TRUE(sums());
  }
}

TEST_F(DirectInWorkers, GoOnWithoutSpares) {
  TROUPE_NEEDS_DEVICES(2);
  auto& w = start();
  for (std::size_t round = 0; round < 2; ++round) {
    const auto epoch = w.status().epoch;
    EXPECT_EQ(code_of(kill_worker(w.device_of(round % w.size()))), errc::worker_lost);
    feed_->until(world_phase::ready, epoch + 1);
    EXPECT_TRUE(sums());
  }
}

TEST_F(DirectInWorkers, GoOnWithFewerRanks) {
  TROUPE_HOST_ONLY("three devices");
  auto& w = start(standby_policy::none, loss_policy::shrink); // direct ones are prepared anyway
  until_prepared();
  EXPECT_EQ(code_of(kill_worker(w.device_of(1))), errc::worker_lost);
  const auto done = must(answer_of(w.barrier({.allow_shrunk = true})));
  EXPECT_EQ(done.way, collective_way::direct);
  EXPECT_TRUE(eventually([&] { return w.status().members.size() == w.size(); }));
  EXPECT_TRUE(eventually([&] { return sums() == true; }));
}

/// The next communicator is there at once.
TEST_F(DirectInWorkers, GoOnAfterAStall) {
  TROUPE_NEEDS_DEVICES(2);
  system_.emplace(in_worker_processes(2));
  world_config config;
  config.collectives = collectives_policy::direct;
  config.limits.stall_limit = 200ms;
  config.limits.restarts = 1000;
  world_.emplace(system_->open_world(config));
  feed_.emplace(*system_, world_->actor());
  for (int round = 0; round < 3; ++round) {
    const auto before = until_prepared(world_->status().epoch);
    auto data = must(world_->allocate<std::uint32_t>(count));
    for (std::size_t i = 0; i < world_->size(); ++i)
      must(answer_of(world_->device_of(i).fill(data[i], 1u)));
    {
      const gate closed{true};
      const auto held = closed.hold_lane(world_->device_of(1));
      ASSERT_TRUE(closed.wait_reached());
      EXPECT_TRUE(has_code(answer_of(world_->all_reduce(data, reduce_op::sum)), errc::stalled));
      EXPECT_EQ(world_->status().epoch, before.epoch + 1);
    }
    EXPECT_TRUE(sums());
  }
}

TEST_F(DirectInWorkers, AreForEightRanksAtMost) {
  TROUPE_HOST_ONLY("nine devices");
  system_.emplace(in_worker_processes(9));
  EXPECT_TRUE(has_code(system_->try_open_world({.collectives = collectives_policy::direct}).error(),
                       errc::not_supported));
  world_.emplace(must(world::open(*system_, {.devices = system_->ordinals()})));
  EXPECT_TRUE(works(*world_));
}

} // namespace

} // namespace troupe::testing
