// Standby communicators: a world continues at once when its communicator ends.

#include "support/forwarding_backend.hpp"
#include "support/load.hpp"
#include "support/world_fixture.hpp"
#include <troupe/detail/caf_compat.hpp>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <thread>

namespace troupe::testing {
namespace {

constexpr std::size_t count = 1000;

/// Counts the communicators that a backend has.
class counting_backend final : public forwarding_backend {
public:
  using forwarding_backend::forwarding_backend;

  caf::expected<communicator_ranks> build(const communicator_id& id, int size,
                                          std::span<const local_rank> ranks) noexcept override {
    auto result = inner_->build(id, size, ranks);
    if (result)
      change(1);
    return result;
  }
  caf::error abort(communicator_ranks ranks) noexcept override {
    auto result = inner_->abort(std::move(ranks));
    change(-1);
    return result;
  }
  caf::error destroy(communicator_ranks ranks) noexcept override {
    auto result = inner_->destroy(std::move(ranks));
    change(-1);
    return result;
  }

  int number() const {
    std::lock_guard lock{mutex_};
    return number_;
  }
  int most() const {
    std::lock_guard lock{mutex_};
    return most_;
  }
  /// Blocks until the backend has `number` communicators. Returns false after `patience`.
  bool wait_for(int number) const {
    std::unique_lock lock{mutex_};
    return changed_.wait_for(lock, patience, [&] { return number_ == number; });
  }

private:
  void change(int by) {
    std::lock_guard lock{mutex_};
    number_ += by;
    most_ = std::max(most_, number_);
    changed_.notify_all();
  }

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  int number_ = 0;
  int most_ = 0;
};

world_config with_standby() {
  world_config config;
  config.limits.standby = standby_policy::communicators;
  config.limits.stall_limit = on_cuda() ? 300ms : 100ms;
  config.limits.restart_backoff = 1ms;
  config.limits.restarts = 1 << 20;
  // On a busy machine a lane needs time to return.
  config.limits.quiet_limit = std::chrono::seconds{10};
  return config;
}

std::vector<any_gpu_ref> zeros(const world& on) {
  return must(on.allocate(dtype::float32, count, true));
}

world_status until_standby(world_feed& feed, std::uint64_t from_epoch = 0) {
  return feed.until([&](const world_status& x) {
    return x.phase == world_phase::ready && x.standby_ready && x.epoch >= from_epoch;
  });
}

bool never_left_ready(const std::vector<world_status>& seen) {
  return std::all_of(seen.begin(), seen.end(),
                     [](auto& x) { return x.phase == world_phase::ready; });
}

class Standby : public ::testing::Test {
public:
  test_system make_system(int devices = 3) {
    return test_system{
        {.devices = devices, .faults = plan, .wrap = [this](std::shared_ptr<backend> inner) {
           counted = std::make_shared<counting_backend>(std::move(inner));
           return counted;
         }}};
  }

  std::shared_ptr<fault_plan> plan = std::make_shared<fault_plan>();
  std::shared_ptr<counting_backend> counted;
};

TEST_F(Standby, IsBuiltBesideTheLiveOneAndTold) {
  TROUPE_NEEDS_DEVICES(2);
  auto system = make_system();
  auto w = system.open_world(with_standby());
  world_feed feed{system, w.actor()};
  const auto told = until_standby(feed);
  EXPECT_EQ(told.epoch, 1u);
  EXPECT_EQ(told.membership, 1u);
  EXPECT_TRUE(is_ok(told.reason));
  EXPECT_TRUE(w.status().standby_ready);
  EXPECT_EQ(counted->number(), 2);
  EXPECT_TRUE(works(w));
  EXPECT_TRUE(never_left_ready(feed.seen()));
}

TEST_F(Standby, IsNotThereByDefault) {
  TROUPE_NEEDS_DEVICES(2);
  auto system = make_system();
  auto w = system.open_world();
  EXPECT_TRUE(works(w));
  EXPECT_FALSE(w.status().standby_ready);
  EXPECT_EQ(counted->most(), 1);
}

// -- the switch

struct ending {
  const char* name;
  fault kind;
  errc told;
};

class StandbySwitch : public Standby, public ::testing::WithParamInterface<ending> {};

INSTANTIATE_TEST_SUITE_P(Ends, StandbySwitch,
                         ::testing::Values(ending{"NotIssued", fault::not_issued, errc::stalled},
                                           ending{"Hang", fault::hang, errc::stalled},
                                           ending{"Error", fault::fail, errc::nccl_error}),
                         [](const auto& x) { return std::string{x.param.name}; });

// INV-7
TEST_P(StandbySwitch, AnswersTheOldEpochWithOneCauseAndGoesOnAtOnce) {
  TROUPE_NEEDS_DEVICES(2);
  auto system = make_system();
  auto w = system.open_world(with_standby());
  world_feed feed{system, w.actor()};
  until_standby(feed);
  auto refs = zeros(w);
  const auto untouched = prepare(w, {.type = dtype::float32, .op = reduce_op::sum}, count);
  // The build of the next communicator is blocked, so later results cannot come from it.
  if (!on_cuda())
    plan->add({fault::block, verb::build});
  plan->add({GetParam().kind, verb::collective, 1});
  std::vector<pending<collective_done>> all;
  {
    gate together; // all of them are admitted before the first one fails
    auto launched = together.hold_lane(w.device_of(1));
    ASSERT_TRUE(together.wait_reached());
    for (int i = 0; i < 5; ++i)
      all.push_back(w.all_reduce(refs));
  }
  caf::error first;
  for (auto& x : all) {
    const auto why = error_of(answer_of(x));
    ASSERT_TRUE(has_code(why, GetParam().told));
    if (!first)
      first = why;
    EXPECT_EQ(describe(why), describe(first));
  }
  EXPECT_EQ(failure_of(first)->epoch, 1u);
  EXPECT_EQ(failure_of(first)->operation, all[0].number());
  const auto done = must(answer_of(w.all_reduce(untouched.send)));
  EXPECT_EQ(done.epoch, 2u);
  EXPECT_EQ(done.membership, 1u);
  EXPECT_TRUE(reduced(w, untouched, untouched.send));
  const auto switched = feed.until([](auto& x) { return x.epoch == 2; });
  EXPECT_EQ(switched.phase, world_phase::ready);
  EXPECT_EQ(switched.membership, 1u);
  EXPECT_TRUE(has_code(switched.reason, GetParam().told));
  EXPECT_FALSE(switched.standby_ready);
  if (!on_cuda()) {
    ASSERT_TRUE(plan->wait_injected(fault::block, 1, patience));
    plan->release();
  }
  const auto next = until_standby(feed, 2);
  EXPECT_EQ(next.epoch, 2u);
  EXPECT_TRUE(is_ok(next.reason));
  EXPECT_TRUE(never_left_ready(feed.seen()));
  EXPECT_TRUE(works(w));
  EXPECT_EQ(counted->number(), 2);
  EXPECT_LE(counted->most(), 2 + (on_cuda() ? 1 : 0));
  for (std::size_t i = 0; i < w.size(); ++i)
    EXPECT_EQ(w.device_of(i).generation(), 1u);
}

TEST_F(Standby, GoesOnWhenARankCannotBeIssued) {
  TROUPE_HOST_ONLY("its lane is held");
  auto system = make_system();
  auto config = with_standby();
  config.limits.stall_limit = patience;
  auto w = system.open_world(config);
  world_feed feed{system, w.actor()};
  until_standby(feed);
  auto refs = zeros(w);
  const auto data = prepare(w, {.type = dtype::int32, .op = reduce_op::sum}, count);
  plan->add({.kind = fault::fail, .on = verb::collective, .device = 2, .error = errc::cuda_error});
  gate held;
  auto launched = held.hold_lane(w.device_of(2));
  ASSERT_TRUE(held.wait_reached());
  auto lost = w.all_reduce(refs);
  auto behind = w.all_reduce(refs);
  for (std::size_t i = 0; i < 2; ++i) // the other ranks have issued theirs
    while (must(answer_of(w.device_of(i).stats())).in_flight == 0)
      std::this_thread::yield();
  held.open();
  const auto why = error_of(answer_of(lost));
  ASSERT_TRUE(why);
  EXPECT_FALSE(answer_of(behind));
  const auto switched = feed.until([](auto& x) { return x.epoch == 2; });
  EXPECT_TRUE(has_code(switched.reason, errc::rank_not_issued));
  EXPECT_EQ(failure_of(switched.reason)->rank, 2);
  ASSERT_TRUE(is_ok(answer_of(w.all_reduce(data.send))));
  EXPECT_TRUE(reduced(w, data, data.send));
  until_standby(feed, 2);
  EXPECT_TRUE(never_left_ready(feed.seen()));
}

// One rank's calls wait for the other rank's when the communicator ends. They continue on the next
// communicator, behind work that hangs on their buffers.
TEST_F(Standby, RankLocalCallsOfTwoEpochsMeet) {
  TROUPE_HOST_ONLY("a fault plan");
  auto system = make_system(2);
  auto w = system.open_world(with_standby());
  world_feed feed{system, w.actor()};
  until_standby(feed);
  const auto data = prepare(w, {.type = dtype::int32, .op = reduce_op::sum}, count);
  auto first = w.rank(0).all_reduce(data.send[0]);
  plan->add({fault::not_issued, verb::collective, 1});
  EXPECT_TRUE(has_code(answer_of(w.all_reduce(zeros(w))), errc::stalled));
  EXPECT_FALSE(first.ready());
  auto second = w.rank(1).all_reduce(data.send[1]);
  EXPECT_EQ(must(answer_of(first)).epoch, 2u);
  EXPECT_TRUE(is_ok(answer_of(second)));
  EXPECT_TRUE(reduced(w, data, data.send));
}

// The call follows work on its buffers that hangs on the old communicator. On the old communicator,
// stream order would have kept them in order. Now the call must wait for the abort.
TEST_F(Standby, WorkOnTheSameBuffersWaitsForTheOldCommunicator) {
  TROUPE_HOST_ONLY("a fault plan");
  auto system = make_system(2);
  auto w = system.open_world(with_standby());
  world_feed feed{system, w.actor()};
  until_standby(feed);
  const auto data = prepare(w, {.type = dtype::float32, .op = reduce_op::sum}, count);
  const auto refs = zeros(w);
  plan->add({fault::not_issued, verb::collective, 1});
  plan->add({fault::block, verb::abort});
  auto stands = w.all_reduce(refs);
  ASSERT_TRUE(plan->wait_injected(fault::not_issued, 1, patience));
  auto first = w.rank(0).all_reduce(data.send[0], refs[0]);
  EXPECT_TRUE(has_code(answer_of(stands), errc::stalled));
  ASSERT_TRUE(plan->wait_injected(fault::block, 1, patience));
  EXPECT_TRUE(works(w)); // on other buffers
  auto second = w.rank(1).all_reduce(data.send[1], refs[1]);
  EXPECT_FALSE(must(second.wait_for(100ms)));
  plan->release();
  EXPECT_EQ(must(answer_of(first)).epoch, 2u);
  EXPECT_TRUE(is_ok(answer_of(second)));
  EXPECT_TRUE(reduced(w, data, refs));
}

// -- without a standby

TEST_F(Standby, OneThatIsBeingBuiltBecomesTheLiveOne) {
  TROUPE_HOST_ONLY("a fault plan");
  plan->add({fault::block, verb::build, any_device, 2});
  auto system = make_system();
  auto w = system.open_world(with_standby());
  world_feed feed{system, w.actor()};
  ASSERT_TRUE(plan->wait_injected(fault::block, 1, patience));
  const auto data = prepare(w, {.type = dtype::int32, .op = reduce_op::sum}, count);
  plan->add({fault::not_issued, verb::collective, 0});
  EXPECT_TRUE(has_code(answer_of(w.all_reduce(zeros(w))), errc::stalled));
  EXPECT_TRUE(has_code(feed.until(world_phase::building).reason, errc::stalled));
  auto waits = w.all_reduce(data.send);
  EXPECT_FALSE(waits.ready());
  plan->release();
  EXPECT_EQ(must(answer_of(waits)).epoch, 2u);
  EXPECT_TRUE(reduced(w, data, data.send));
  EXPECT_EQ(until_standby(feed, 2).epoch, 2u);
}

class StandbyThatFails : public Standby, public ::testing::WithParamInterface<verb> {};

INSTANTIATE_TEST_SUITE_P(In, StandbyThatFails, ::testing::Values(verb::build, verb::connect),
                         [](const auto& x) { return std::string{to_string(x.param)}; });

TEST_P(StandbyThatFails, DoesNotHurtTheLiveOne) {
  TROUPE_HOST_ONLY("a fault plan");
  const auto rule = plan->add({fault::fail, GetParam(), any_device, 2, 6});
  auto system = make_system();
  auto config = with_standby();
  config.limits.restarts = 2; // the failed standbys do not count as restarts
  auto w = system.open_world(config);
  world_feed feed{system, w.actor()};
  while (plan->injected_by(rule) < 6)
    EXPECT_TRUE(works(w));
  EXPECT_EQ(until_standby(feed).epoch, 1u);
  EXPECT_TRUE(works(w));
  EXPECT_TRUE(never_left_ready(feed.seen()));
  plan->add({fault::not_issued, verb::collective, 1});
  EXPECT_TRUE(has_code(answer_of(w.all_reduce(zeros(w))), errc::stalled));
  EXPECT_TRUE(works(w));
  EXPECT_GT(until_standby(feed, 2).epoch, 6u);
  EXPECT_TRUE(never_left_ready(feed.seen()));
}

// A rank that does not connect blocks the other ranks' lanes only for the connect limit.
TEST_F(Standby, OneThatCannotBeConnectedInTimeIsGivenUp) {
  TROUPE_IN_PROCESS_ONLY("workers connect when they build, not on the lane");
  TROUPE_HOST_ONLY("its lane is held");
  plan->add({fault::block, verb::build, any_device, 2});
  auto system = make_system(2);
  auto config = with_standby();
  config.limits.connect_limit = 300ms;
  gate held;
  auto w = system.open_world(config);
  world_feed feed{system, w.actor()};
  auto launched = held.hold_lane(w.device_of(1));
  ASSERT_TRUE(held.wait_reached());
  ASSERT_TRUE(plan->wait_injected(fault::block, 1, patience));
  plan->release();
  EXPECT_TRUE(counted->wait_for(2));
  EXPECT_TRUE(counted->wait_for(1));
  EXPECT_FALSE(launched.ready());
  EXPECT_TRUE(works(w.device_of(0)));
  held.open();
  EXPECT_TRUE(is_ok(answer_of(launched)));
  EXPECT_EQ(until_standby(feed).epoch, 1u);
  EXPECT_TRUE(works(w));
  EXPECT_TRUE(never_left_ready(feed.seen()));
}

// The budget counts ends of communicators, not standbys. The last standby is still used.
TEST_F(Standby, UsesUpTheRestarts) {
  TROUPE_HOST_ONLY("a fault plan");
  auto system = make_system(2);
  auto config = with_standby();
  config.limits.restarts = 2;
  config.limits.stall_limit = 20ms;
  auto w = system.open_world(config);
  world_feed feed{system, w.actor()};
  for (std::uint64_t epoch = 1; epoch <= 4; ++epoch) {
    if (epoch <= 3)
      until_standby(feed, epoch);
    plan->add({fault::not_issued, verb::collective, 0});
    EXPECT_TRUE(has_code(answer_of(w.all_reduce(zeros(w))), errc::stalled));
    if (epoch <= 3)
      feed.until(world_phase::ready, epoch + 1);
  }
  const auto end = feed.until(world_phase::failed);
  ASSERT_TRUE(has_code(end.reason, errc::stalled));
  EXPECT_NE(describe(end.reason).find("2 restarts"), std::string::npos) << describe(end.reason);
  EXPECT_TRUE(counted->wait_for(0));
}

// -- the end of both communicators

TEST_F(Standby, EndsWithAResetOfADevice) {
  TROUPE_NEEDS_DEVICES(2);
  auto system = make_system();
  auto w = system.open_world(with_standby());
  world_feed feed{system, w.actor()};
  for (std::uint64_t i = 1; i <= 3; ++i) {
    const auto before = until_standby(feed, w.status().epoch);
    const auto rank = i % w.size();
    EXPECT_EQ(must(answer_of(w.device_of(rank).reset())), before.members[rank].generation + 1);
    // A status from before would show an earlier generation.
    const auto now = feed.until(world_phase::ready, before.epoch + 2);
    EXPECT_EQ(now.membership, before.membership + 1);
    EXPECT_EQ(now.members[rank].generation, before.members[rank].generation + 1);
    EXPECT_TRUE(works(w));
    until_standby(feed, now.epoch);
    EXPECT_EQ(counted->number(), 2);
  }
}

TEST_F(Standby, AResetWhileOneIsBuilt) {
  TROUPE_HOST_ONLY("a fault plan");
  plan->add({fault::block, verb::build, any_device, 2});
  auto system = make_system();
  auto w = system.open_world(with_standby());
  world_feed feed{system, w.actor()};
  ASSERT_TRUE(plan->wait_injected(fault::block, 1, patience));
  EXPECT_EQ(must(answer_of(w.device_of(1).reset())), 2u);
  plan->release();
  const auto now = until_standby(feed, 2);
  EXPECT_EQ(now.members[1].generation, 2u);
  EXPECT_EQ(now.membership, 2u);
  EXPECT_TRUE(works(w));
  EXPECT_EQ(counted->number(), 2);
}

TEST_F(Standby, EndsWithItsWorld) {
  TROUPE_NEEDS_DEVICES(2);
  auto system = make_system();
  auto actor = system.spawn_world(with_standby());
  world_feed feed{system, actor};
  until_standby(feed);
  EXPECT_EQ(counted->number(), 2);
  detail::anon_send(actor, shutdown{});
  feed.until(world_phase::shut_down);
  EXPECT_TRUE(counted->wait_for(0));
}

TEST_F(Standby, AWorldThatEndsWhileOneIsBuilt) {
  TROUPE_HOST_ONLY("a fault plan");
  plan->add({fault::block, verb::build, any_device, 2});
  auto system = make_system();
  {
    auto w = system.open_world(with_standby());
    ASSERT_TRUE(plan->wait_injected(fault::block, 1, patience));
    EXPECT_TRUE(works(w));
  }
  plan->release();
  EXPECT_TRUE(counted->wait_for(0));
}

TEST_F(Standby, IsNoHelpAgainstAFault) {
  TROUPE_HOST_ONLY("a fault plan");
  auto system = make_system();
  auto w = system.open_world(with_standby());
  world_feed feed{system, w.actor()};
  until_standby(feed);
  plan->add({fault::poison, verb::collective, 1});
  EXPECT_TRUE(has_code(answer_of(w.all_reduce(zeros(w))), errc::device_fault));
  EXPECT_TRUE(has_code(feed.until(world_phase::failed).reason, errc::device_fault));
  EXPECT_FALSE(w.status().standby_ready);
}

// -- several worlds

TEST_F(Standby, OfTwoWorldsOverTheSameDevices) {
  TROUPE_HOST_ONLY("a fault plan");
  auto system = make_system();
  auto a = system.open_world(with_standby());
  auto config = with_standby();
  config.devices = {2, 1};
  auto b = system.open_world(config);
  world_feed feed_a{system, a.actor()};
  world_feed feed_b{system, b.actor()};
  for (std::uint64_t i = 1; i <= 4; ++i) {
    const auto epoch_a = until_standby(feed_a, a.status().epoch).epoch;
    const auto epoch_b = until_standby(feed_b, b.status().epoch).epoch;
    EXPECT_EQ(counted->number(), 4);
    auto& broken = i % 2 == 0 ? a : b;
    auto& fine = i % 2 == 0 ? b : a;
    const auto rule = plan->add({fault::not_issued, verb::collective, 1});
    auto stands = broken.all_reduce(zeros(broken));
    while (plan->injected_by(rule) == 0)
      std::this_thread::yield();
    EXPECT_TRUE(works(fine, i));
    EXPECT_TRUE(has_code(answer_of(stands), errc::stalled));
    EXPECT_TRUE(works(broken, i));
    EXPECT_TRUE(works(fine, i));
    EXPECT_EQ(a.status().epoch, epoch_a + (i % 2 == 0 ? 1 : 0));
    EXPECT_EQ(b.status().epoch, epoch_b + (i % 2 == 0 ? 0 : 1));
  }
  until_standby(feed_a, a.status().epoch);
  until_standby(feed_b, b.status().epoch);
  EXPECT_TRUE(never_left_ready(feed_a.seen()));
  EXPECT_TRUE(never_left_ready(feed_b.seen()));
}

// Communicators connect while other worlds use the same devices: no cycle forms and no stall is
// reported.
TEST_F(Standby, IsConnectedBesideLoad) {
  TROUPE_NEEDS_DEVICES(2);
  auto system = make_system();
  auto config = with_standby();
  config.limits.stall_limit = patience;
  auto a = system.open_world();
  auto b = system.open_world({.devices = {1, 0}});
  std::atomic<bool> stop = false;
  std::atomic<int> rounds = 0;
  std::vector<std::thread> clients;
  for (auto* w : {&a, &b, &a})
    clients.emplace_back([&, w] {
      auto refs = zeros(*w);
      while (!stop) {
        std::vector<pending<collective_done>> all;
        for (int i = 0; i < 10; ++i)
          all.push_back(w->all_reduce(refs));
        for (auto& x : all)
          EXPECT_TRUE(is_ok(answer_of(x)));
        ++rounds;
      }
    });
  for (int i = 0; i < 6; ++i) {
    auto w = system.open_world(config);
    world_feed feed{system, w.actor()};
    until_standby(feed);
    EXPECT_TRUE(works(w));
  }
  stop = true;
  for (auto& x : clients)
    x.join();
  EXPECT_GT(rounds, 0);
  EXPECT_EQ(a.status().epoch, 1u);
  EXPECT_EQ(b.status().epoch, 1u);
}

TEST_F(Standby, IsBuiltAgainWithoutAPause) {
  TROUPE_NEEDS_DEVICES(2);
  auto system = make_system(2);
  auto config = with_standby();
  config.limits.restart_backoff = std::chrono::hours{1};
  auto w = system.open_world(config);
  world_feed feed{system, w.actor()};
  for (int i = 0; i < 3; ++i) {
    until_standby(feed, w.status().epoch);
    plan->add({fault::fail, verb::collective, 1});
    EXPECT_FALSE(answer_of(w.barrier()));
    EXPECT_TRUE(works(w));
  }
  until_standby(feed, w.status().epoch);
}

// -- many times

TEST_F(Standby, GoesOnAHundredTimesUnderLoadWithoutGrowth) {
  TROUPE_HOST_ONLY("a fault plan, and its threads");
  auto system = make_system(2);
  auto config = with_standby();
  config.limits.restart_backoff = 0ms;
  config.limits.stall_limit = 50ms;
  auto w = system.open_world(config);
  world_feed feed{system, w.actor()};
  std::atomic<bool> stop = false;
  std::atomic<int> right = 0;
  std::vector<std::thread> clients;
  for (int i = 0; i < 3; ++i)
    clients.emplace_back([&] { add_up(w, stop, right); });
  std::size_t threads = 0;
  std::size_t memory = 0;
  set_log_sink([](const log_line&) {}); // the ends of a hundred communicators are logged
  for (int i = 1; i <= 100; ++i) {
    const auto epoch = until_standby(feed, w.status().epoch).epoch;
    const auto before = right.load();
    plan->add({i % 2 == 0 ? fault::not_issued : fault::fail, verb::collective, i % 3 == 0 ? 0 : 1});
    feed.until([&](const world_status& x) { return x.epoch > epoch; });
    while (right < before + 5)
      std::this_thread::yield();
    if (i == 40) {
      until_standby(feed, epoch + 1);
      threads = threads_of_this_process();
      memory = resident_memory();
    }
  }
  until_standby(feed, w.status().epoch);
  EXPECT_LE(counted->most(), 3);
  stop = true;
  for (auto& x : clients)
    x.join();
  set_log_sink({});
  EXPECT_EQ(counted->number(), 2);
  EXPECT_LE(threads_of_this_process(), threads);
  EXPECT_LE(resident_memory(), memory + memory_slack);
  EXPECT_TRUE(works(w));
}

// -- latency

// Measured from the report of a stall to the first correct sum, on other buffers.
TEST_F(Standby, TimeToTheNextRightSum) {
  TROUPE_NEEDS_DEVICES(2);
  auto system = make_system(on_cuda() ? 8 : 3);
  auto w = system.open_world(with_standby());
  world_feed feed{system, w.actor()};
  for (int i = 0; i < 5; ++i) {
    const auto epoch = until_standby(feed, w.status().epoch).epoch;
    const auto data = prepare(w, {.type = dtype::float32, .op = reduce_op::sum}, count);
    plan->add({fault::not_issued, verb::collective, 1});
    auto stands = w.all_reduce(zeros(w));
    ASSERT_TRUE(has_code(answer_of(stands), errc::stalled));
    const stopwatch since_report;
    const auto done = must(answer_of(w.all_reduce(data.send)));
    const auto time = since_report.elapsed();
    EXPECT_GT(done.epoch, epoch);
    EXPECT_TRUE(reduced(w, data, data.send));
    std::printf("%.3f ms from the report of a stall to the next right all-reduce, %zu ranks\n",
                std::chrono::duration<double, std::milli>(time).count(), w.size());
    EXPECT_LT(time, at_once);
  }
  EXPECT_TRUE(never_left_ready(feed.seen()));
}

} // namespace
} // namespace troupe::testing
