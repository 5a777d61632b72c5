/// Worlds whose collectives go two ways: direct, and by NCCL beside that. The communicator of NCCL
/// is built when a request needs it.
#include "support/eventually.hpp"
#include "support/forwarding_backend.hpp"
#include "support/world_fixture.hpp"
#include <troupe/troupe.hpp>

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

constexpr std::size_t few = 16;    ///< elements that go direct
constexpr std::size_t many = 1000; ///< elements that go by NCCL

world_config both_ways() {
  world_config result;
  result.collectives = collectives_policy::automatic;
  result.ways.emplace().direct_up_to.fill(few * sizeof(float));
  return result;
}

/// Counts the communicators of NCCL that are built, and those that are called off.
class counting_backend final : public forwarding_backend {
public:
  counting_backend(std::shared_ptr<backend> inner, std::shared_ptr<std::atomic<int>> builds,
                   std::shared_ptr<std::atomic<int>> called_off)
      : forwarding_backend(std::move(inner)), builds_(std::move(builds)),
        called_off_(std::move(called_off)) {}

  caf::expected<communicator_ranks> build(const communicator_id& id, int size,
                                          std::span<const local_rank> ranks) noexcept override {
    builds_->fetch_add(1);
    return forwarding_backend::build(id, size, ranks);
  }

  void call_off(const communicator_id& id) noexcept override {
    forwarding_backend::call_off(id);
    called_off_->fetch_add(1);
  }

private:
  const std::shared_ptr<std::atomic<int>> builds_;
  const std::shared_ptr<std::atomic<int>> called_off_;
};

collective_way way_of(const caf::expected<collective_done>& x) { return must(x).way; }

/// A world, and how many communicators of NCCL were built.
class Ways : public ::testing::Test {
protected:
  void SetUp() override { TROUPE_IN_PROCESS_ONLY("direct collectives"); }

  world open(world_config config = both_ways()) {
    auto result = system_.open_world(std::move(config));
    few_ = must(result.allocate(dtype::float32, few, true));
    many_ = must(result.allocate(dtype::float32, many, true));
    return result;
  }

  std::shared_ptr<fault_plan> plan_ = std::make_shared<fault_plan>(1);
  std::shared_ptr<std::atomic<int>> builds_ = std::make_shared<std::atomic<int>>(0);
  std::shared_ptr<std::atomic<int>> called_off_ = std::make_shared<std::atomic<int>>(0);
  test_system system_{{.devices = 3, .faults = plan_, .wrap = [this](auto inner) {
                         return std::make_shared<counting_backend>(std::move(inner), builds_,
                                                                   called_off_);
                       }}};
  std::vector<any_gpu_ref> few_;
  std::vector<any_gpu_ref> many_;
};

TEST_F(Ways, AreAFunctionOfTheSize) {
  auto w = open();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(way_of(answer_of(w.all_reduce(few_, reduce_op::sum))), collective_way::direct);
    EXPECT_EQ(way_of(answer_of(w.all_reduce(many_, reduce_op::sum))), collective_way::nccl);
    EXPECT_EQ(way_of(answer_of(w.barrier())), collective_way::direct);
  }
  // A group goes one way.
  group all{
      {all_reduce{few_, {}, reduce_op::sum, {}, {}}, all_reduce{many_, {}, reduce_op::sum, {}, {}}},
      {}};
  EXPECT_EQ(way_of(answer_of(w.run(all))), collective_way::nccl);
}

TEST_F(Ways, AreOneForEachOtherPolicy) {
  auto config = both_ways();
  config.collectives = collectives_policy::direct;
  auto w = open(config);
  EXPECT_EQ(way_of(answer_of(w.all_reduce(many_, reduce_op::sum))), collective_way::direct);
  if (collectives_of_run() != collectives_policy::nccl)
    return;
  w = open({});
  EXPECT_EQ(way_of(answer_of(w.all_reduce(few_, reduce_op::sum))), collective_way::nccl);
}

TEST_F(Ways, OfRanksCallsAreTheSame) {
  auto w = open();
  std::vector<pending<collective_done>> all;
  for (std::size_t rank = 0; rank < w.size(); ++rank) {
    all.push_back(w.rank(rank).all_reduce(few_[rank], reduce_op::sum));
    all.push_back(w.rank(rank).all_reduce(many_[rank], reduce_op::sum));
  }
  for (std::size_t i = 0; i < all.size(); ++i)
    EXPECT_EQ(way_of(answer_of(all[i])),
              i % 2 == 0 ? collective_way::direct : collective_way::nccl);
}

TEST_F(Ways, BuildNcclOnlyWhereARequestNeedsIt) {
  TROUPE_HOST_ONLY("a fault plan");
  auto w = open();
  const auto before = builds_->load();
  for (int i = 0; i < 10; ++i)
    EXPECT_TRUE(is_ok(answer_of(w.all_reduce(few_, reduce_op::sum))));
  EXPECT_EQ(builds_->load(), before);
  for (int i = 0; i < 10; ++i)
    EXPECT_TRUE(is_ok(answer_of(w.all_reduce(many_, reduce_op::sum))));
  EXPECT_EQ(builds_->load(), before + 1);
}

TEST_F(Ways, BuildNcclAheadIfAsked) {
  TROUPE_HOST_ONLY("a fault plan");
  auto config = both_ways();
  config.nccl_ahead = true;
  auto w = open(config);
  EXPECT_TRUE(eventually([&] { return builds_->load() == 1; }));
  EXPECT_EQ(way_of(answer_of(w.all_reduce(many_, reduce_op::sum))), collective_way::nccl);
  EXPECT_EQ(builds_->load(), 1);
}

TEST(WaysOverLinks, AreByNcclWhereADeviceHasNoAccess) {
  TROUPE_HOST_ONLY("links of the host backend");
  TROUPE_IN_PROCESS_ONLY("direct collectives");
  config cfg;
  cfg.use_backend(
      make_host_backend({.devices = 3, .links = {{.from = 2, .to = 0, .access = false}}}));
  caf::actor_system sys{cfg};
  const auto way_between = [&](std::vector<int> devices) {
    auto w = must(world::open(sys, {.devices = std::move(devices)}));
    return way_of(w.all_reduce(must(w.allocate<float>(10))).wait());
  };
  EXPECT_EQ(way_between({0, 1}), collective_way::direct);
  EXPECT_EQ(way_between({0, 1, 2}), collective_way::nccl);
  auto all = must(world::open(sys, {.devices = {0, 1, 2}}));
  const auto groups = must(all.split("group", {0, 0, 1}));
  EXPECT_EQ(way_of(groups[0].barrier().wait()), collective_way::direct) << "of devices 0 and 1";
  EXPECT_TRUE(
      has_code(world::open(sys, {.devices = {0, 2}, .collectives = collectives_policy::direct}),
               errc::not_supported));
}

/// After the last restart that is allowed for a while, there is no standby until then.
TEST_F(Ways, HaveADirectStandbyAgainWhenTheWorldMayRestartAgain) {
  TROUPE_HOST_ONLY("a fault plan");
  world_config config;
  config.collectives = collectives_policy::direct;
  config.limits.restarts = 1;
  config.limits.restart_window = std::chrono::milliseconds{300};
  config.limits.stall_limit = std::chrono::milliseconds{20};
  auto w = open(config);
  EXPECT_TRUE(eventually([&] { return w.status().standby_ready; }));
  plan_->add({fault::not_issued, verb::collective, 0});
  EXPECT_TRUE(has_code(answer_of(w.all_reduce(many_, reduce_op::sum)), errc::stalled));
  EXPECT_EQ(must(answer_of(w.barrier())).epoch, 2u);
  EXPECT_TRUE(eventually([&] { return w.status().standby_ready && is_ok(w.status().reason); }));
}

TEST_F(Ways, AreAllDirectByDefault) {
  TROUPE_HOST_ONLY("GPUs need not reach each other");
  auto w = must(world::open(system_.get(), {.devices = {0, 1}, .nccl_ahead = true}));
  auto large = must(w.allocate<float>(1 << 20));
  EXPECT_EQ(way_of(answer_of(w.all_reduce(large))), collective_way::direct);
  EXPECT_EQ(builds_->load(), 0);
}

/// A chain over both ways keeps its order.
TEST_F(Ways, KeepTheOrderOfTheirBuffers) {
  auto w = open();
  std::vector<any_gpu_ref> heads;
  for (auto& x : many_)
    heads.push_back(must(x.slice(0, few)));
  constexpr int rounds = 20;
  for (std::size_t rank = 0; rank < w.size(); ++rank)
    EXPECT_TRUE(is_ok(answer_of(w.device_of(rank).fill(many_[rank], 1.0F))));
  std::vector<pending<collective_done>> all;
  double head = 1;
  double tail = 1;
  for (int i = 0; i < rounds; ++i) {
    all.push_back(w.all_reduce(heads, reduce_op::avg));
    all.push_back(w.all_reduce(many_, reduce_op::max));
    for (std::size_t rank = 0; rank < w.size(); ++rank)
      EXPECT_TRUE(is_ok(answer_of(w.device_of(rank).fill(heads[rank], float(i + 2)))));
    head = i + 2;
  }
  for (auto& x : all)
    EXPECT_TRUE(is_ok(answer_of(x)));
  for (std::size_t rank = 0; rank < w.size(); ++rank) {
    auto got = must(w.device_of(rank).download(must(gpu_ref<float>::from(many_[rank]))));
    EXPECT_EQ(got.front(), static_cast<float>(head));
    EXPECT_EQ(got.back(), static_cast<float>(tail));
  }
}

TEST_F(Ways, GoOnWhereTheOtherOneStandsStill) {
  TROUPE_HOST_ONLY("a fault plan");
  auto config = both_ways();
  config.limits.stall_limit = 100ms;
  auto w = open(config);
  EXPECT_TRUE(is_ok(answer_of(w.all_reduce(many_, reduce_op::sum))));
  const auto status = w.status();
  const auto before = builds_->load();
  // NCCL stands still: the direct way goes on, and nothing of it is built again.
  plan_->add({.kind = fault::hang, .on = verb::collective});
  auto stands = w.all_reduce(many_, reduce_op::sum);
  for (int i = 0; i < 10; ++i)
    EXPECT_TRUE(is_ok(answer_of(w.barrier())));
  EXPECT_TRUE(has_code(answer_of(stands), errc::stalled));
  EXPECT_EQ(w.status().epoch, status.epoch);
  EXPECT_EQ(w.status().phase, world_phase::ready);
  for (auto& x : many_) // what the stalled sum was writing
    EXPECT_TRUE(is_ok(answer_of(system_.open(x.device()).fill(x, 1.0F))));
  EXPECT_TRUE(is_ok(answer_of(w.all_reduce(many_, reduce_op::sum))));
  EXPECT_EQ(builds_->load(), before + 1);
  // The direct way stands still: NCCL's communicator stays.
  plan_->add({.kind = fault::hang, .on = verb::collective});
  EXPECT_TRUE(has_code(answer_of(w.barrier()), errc::stalled));
  const auto epoch = must(answer_of(w.all_reduce(many_, reduce_op::sum))).epoch;
  EXPECT_TRUE(is_ok(answer_of(w.barrier())));
  EXPECT_EQ(must(answer_of(w.all_reduce(many_, reduce_op::sum))).epoch, epoch);
  EXPECT_NE(w.status().epoch, status.epoch);
}

TEST_F(Ways, GoOnWhileNcclIsConnected) {
  TROUPE_HOST_ONLY("a fault plan");
  auto w = open();
  plan_->add({.kind = fault::block, .on = verb::connect, .device = 1});
  auto waits = w.all_reduce(many_, reduce_op::sum);
  ASSERT_TRUE(plan_->wait_injected(fault::block, 1, 20s));
  for (int i = 0; i < 10; ++i)
    EXPECT_EQ(way_of(answer_of(w.barrier())), collective_way::direct);
  EXPECT_FALSE(waits.ready());
  plan_->release();
  EXPECT_EQ(way_of(answer_of(waits)), collective_way::nccl);
}

TEST_F(Ways, GoOnWhereNcclCannotBeBuilt) {
  TROUPE_HOST_ONLY("a fault plan");
  auto config = both_ways();
  config.limits.restart_backoff = 1ms;
  config.limits.connect_limit = 100ms;
  auto w = open(config);
  plan_->add({.kind = fault::fail, .on = verb::build, .times = 2});
  plan_->add({.kind = fault::fail, .on = verb::connect, .device = 1, .times = 2});
  plan_->add({.kind = fault::block, .on = verb::connect, .device = 1, .first = 3});
  auto waits = w.all_reduce(many_, reduce_op::sum);
  EXPECT_TRUE(is_ok(answer_of(w.all_reduce(few_, reduce_op::sum))));
  ASSERT_TRUE(plan_->wait_injected(fault::block, 1, 20s));
  EXPECT_TRUE(eventually([&] { return called_off_->load() == 3; })); // those that failed, and this
  plan_->release();
  EXPECT_TRUE(is_ok(answer_of(waits))); // at last
  EXPECT_EQ(w.status().phase, world_phase::ready);
}

TEST_F(Ways, AreBackAfterAReset) {
  auto w = open();
  EXPECT_TRUE(is_ok(answer_of(w.all_reduce(many_, reduce_op::sum))));
  for (int i = 0; i < 5; ++i) {
    EXPECT_TRUE(is_ok(answer_of(system_.open(1).reset())));
    few_ = must(w.allocate(dtype::float32, few, true));
    many_ = must(w.allocate(dtype::float32, many, true));
    auto large = w.all_reduce(many_, reduce_op::sum);
    EXPECT_EQ(way_of(answer_of(w.all_reduce(few_, reduce_op::sum))), collective_way::direct);
    EXPECT_EQ(way_of(answer_of(large)), collective_way::nccl);
  }
}

TEST_F(Ways, OfWorldsThatAreSplitOff) {
  auto w = open();
  auto colors = std::vector<int>(w.size(), 1);
  colors[0] = colors[1] = 0;
  auto parts = must(w.split("part", colors));
  auto& pair = parts.front();
  auto refs = must(pair.allocate(dtype::float32, many, true));
  EXPECT_EQ(way_of(answer_of(pair.all_reduce(refs, reduce_op::sum))), collective_way::nccl);
  EXPECT_EQ(way_of(answer_of(pair.barrier())), collective_way::direct);
}

TEST_F(Ways, EndWithTheirWorld) {
  auto w = open();
  auto waits = w.all_reduce(many_, reduce_op::sum); // for NCCL's communicator, or runs on it
  detail::anon_send(w.actor(), shutdown{});
  auto why = error_of(answer_of(waits));
  EXPECT_TRUE(!why || code_of(why) == errc::unavailable) << describe(why);
  EXPECT_TRUE(has_code(answer_of(w.all_reduce(many_, reduce_op::sum)), errc::unavailable));
  EXPECT_TRUE(has_code(answer_of(w.barrier()), errc::unavailable));
}

TEST(WaysOfWorkers, AreAllDirect) {
  if (!in_workers())
    GTEST_SKIP() << "for devices in workers";
  test_system system{{.devices = 2}};
  auto w = system.open_world(both_ways());
  for (const auto elements : {few, 100 * few}) {
    auto refs = must(w.allocate(dtype::float32, elements, true));
    EXPECT_EQ(way_of(answer_of(w.all_reduce(refs, reduce_op::sum))), collective_way::direct);
  }
}

TEST(WaysOfNoPolicy, AreRefused) {
  test_system system{{.devices = 1}};
  world_config config;
  config.collectives = static_cast<collectives_policy>(77);
  EXPECT_TRUE(has_code(system.try_open_world(config), errc::invalid_argument));
}

} // namespace

} // namespace troupe::testing
