/// The data side of a world: who waits for a communicator, and how one ends.
#include "core/world_core.hpp"
#include "support/core_fixture.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

namespace troupe {

namespace {

using detail::world_core;
using testing::answer_of;
using testing::borrow;
using testing::core_system;
using testing::eventually;
using testing::fault;
using testing::fault_plan;
using testing::gate;
using testing::has_code;
using testing::host_work;
using testing::is_ok;
using testing::must;
using testing::settles;
using testing::verb;
using namespace std::chrono_literals;

/// A world without its actor.
class a_world {
public:
  explicit a_world(core_system& system, world_limits limits = {}, int first = 0, int size = 2)
      : system_(system) {
    std::vector<std::shared_ptr<detail::lane>> lanes;
    for (int i = 0; i < size; ++i) {
      lanes.push_back(system.lane(first + i));
      auto op = system.device(first + i).allocate(count, dtype::int32, true, {});
      must(answer_of(op));
      refs.push_back(op->value);
    }
    core = std::make_shared<world_core>(system.runtime(), "test", std::move(lanes), limits);
    core->set_on_end([this](std::uint64_t epoch, const caf::error& why) {
      std::lock_guard lock{mutex_};
      ends_.emplace_back(epoch, why);
    });
  }
  ~a_world() {
    core->close(world_phase::shut_down, make_error(errc::unavailable, "the test is over"));
  }

  caf::error build() {
    std::promise<caf::error> built;
    core->build([&](std::uint64_t, const caf::error& why) { built.set_value(why); });
    return built.get_future().get();
  }
  void open() {
    must(build());
    core->open();
  }
  std::shared_ptr<detail::operation_of<collective_done>>
  all_reduce(std::chrono::nanoseconds deadline = 30s) {
    return core->all_reduce(refs, {}, reduce_op::sum, {.deadline = deadline});
  }
  std::vector<std::pair<std::uint64_t, caf::error>> ends() const {
    std::lock_guard lock{mutex_};
    return ends_;
  }

  static constexpr std::size_t count = 64;
  std::shared_ptr<world_core> core;
  std::vector<any_gpu_ref> refs;

private:
  core_system& system_;
  mutable std::mutex mutex_;
  std::vector<std::pair<std::uint64_t, caf::error>> ends_;
};

TEST(WorldCore, KeepsWhatComesBeforeItsCommunicator) {
  core_system system{{.devices = 2}};
  a_world world{system};
  std::vector<std::shared_ptr<detail::operation_of<collective_done>>> early;
  for (int i = 0; i < 20; ++i)
    early.push_back(world.all_reduce());
  early[3]->cancel();
  EXPECT_TRUE(has_code(answer_of(early[3]), errc::cancelled));
  auto late = world.all_reduce(20ms);
  EXPECT_TRUE(has_code(answer_of(late), errc::deadline_exceeded)); // nobody is there to issue it
  world.open();
  std::uint64_t last = 0;
  for (std::size_t i = 0; i < early.size(); ++i) {
    if (i == 3)
      continue;
    EXPECT_TRUE(is_ok(answer_of(early[i])));
    EXPECT_EQ(early[i]->value.epoch, 1u);
    EXPECT_LT(last, early[i]->number());
    last = early[i]->number();
  }
  EXPECT_TRUE(eventually([&] { return system.keeper().size() == 0; }));
}

TEST(WorldCore, BoundsThoseWhoWait) {
  core_system system{{.devices = 2}};
  a_world world{system, {.waiting_limit = 10}};
  std::vector<std::shared_ptr<detail::operation_of<collective_done>>> waiting;
  for (int i = 0; i < 10; ++i)
    waiting.push_back(world.all_reduce());
  EXPECT_TRUE(has_code(answer_of(world.all_reduce()), errc::overloaded));
  waiting[4]->cancel();
  waiting[5]->cancel();
  auto a = world.all_reduce(); // these have room again
  auto b = world.all_reduce();
  EXPECT_FALSE(a->answered());
  EXPECT_FALSE(b->answered());
  EXPECT_TRUE(has_code(answer_of(world.all_reduce()), errc::overloaded));
  world.open();
  EXPECT_TRUE(is_ok(answer_of(a)));
  EXPECT_TRUE(is_ok(answer_of(b)));
  EXPECT_TRUE(is_ok(answer_of(waiting[9])));
}

// INV-1: the end of the world, its opening, deadlines and cancels, all at once.
TEST(WorldCore, AnswersOnceHoweverItsEndRaces) {
  core_system system{{.devices = 2}};
  for (int round = 0; round < 60; ++round) {
    a_world world{system};
    std::atomic<int> answers{0};
    std::vector<std::shared_ptr<detail::operation_of<collective_done>>> all;
    for (int i = 0; i < 40; ++i) {
      all.push_back(world.all_reduce(i % 4 == 0 ? 2ms : 30s));
      all.back()->on_answer([&] { answers.fetch_add(1); });
    }
    must(world.build());
    std::thread opener{[&] { world.core->open(); }};
    std::thread canceller{[&] {
      for (std::size_t i = 1; i < all.size(); i += 4)
        all[i]->cancel();
    }};
    if (round % 3 != 0)
      world.core->close(world_phase::failed, make_error(errc::unavailable, "on purpose"));
    opener.join();
    canceller.join();
    for (auto& x : all)
      answer_of(x);
    EXPECT_TRUE(eventually([&] { return answers == 40; }));
    world.core->close(world_phase::shut_down, make_error(errc::unavailable, "over"));
    ASSERT_TRUE(eventually([&] { return system.keeper().size() == 0; })) << "round " << round;
    EXPECT_TRUE(has_code(answer_of(world.all_reduce()), errc::unavailable));
  }
}

// INV-7
TEST(WorldCore, EndsForOneCauseWhenARankStands) {
  const auto plan = std::make_shared<fault_plan>();
  core_system system{{.devices = 2, .plan = plan}};
  a_world world{system, {.stall_limit = 50ms}};
  world.open();
  must(answer_of(world.all_reduce()));
  plan->add({.kind = fault::not_issued, .on = verb::all_reduce, .device = 1});
  std::vector<std::shared_ptr<detail::operation_of<collective_done>>> all;
  for (int i = 0; i < 10; ++i)
    all.push_back(world.all_reduce());
  for (auto& x : all)
    EXPECT_EQ(answer_of(x), answer_of(all.front()));
  const auto told = failure_of(answer_of(all.front())).value();
  EXPECT_EQ(told.code, errc::stalled);
  EXPECT_EQ(told.epoch, 1u);
  EXPECT_EQ(told.operation, all.front()->number());
  EXPECT_EQ(told.parts.size(), 2u);
  ASSERT_EQ(world.ends().size(), 1u);
  EXPECT_EQ(world.ends()[0].first, 1u);
  EXPECT_EQ(world.core->status().phase, world_phase::building);
  for (auto& x : all)
    EXPECT_TRUE(settles(*x)); // once it is aborted
  EXPECT_TRUE(eventually([&] { return !world.refs[0].access(); }));
  EXPECT_TRUE(has_code(world.refs[0].access(), errc::indeterminate));
  for (std::size_t i = 0; i < 2; ++i)
    must(answer_of(
        system.device(static_cast<int>(i)).fill(world.refs[i], std::vector<std::byte>(4), {})));
  world.open();
  auto again = world.all_reduce();
  EXPECT_TRUE(is_ok(answer_of(again)));
  EXPECT_EQ(again->value.epoch, 2u);
}

TEST(WorldCore, EndsWhenARankCannotBeIssued) {
  const auto plan = std::make_shared<fault_plan>();
  core_system system{{.devices = 2, .plan = plan}};
  a_world world{system, {.stall_limit = 20s}};
  world.open();
  plan->add({.on = verb::all_reduce, .device = 1, .error = errc::nccl_error});
  const auto begin = detail::clock::now();
  gate held;
  auto lane = system.device(1).launch(held.on_lane(), {}, {}, {});
  held.wait_reached();
  auto failed = world.all_reduce();
  auto behind = world.all_reduce();
  held.open();
  EXPECT_TRUE(has_code(answer_of(failed), errc::nccl_error));
  const auto told = failure_of(answer_of(failed)).value(); // INV-10
  EXPECT_EQ(told.verb, "all_reduce");
  EXPECT_EQ(told.operation, failed->number());
  EXPECT_EQ(told.rank, 1);
  EXPECT_EQ(told.device, 1);
  EXPECT_EQ(told.generation, 1u);
  EXPECT_EQ(told.epoch, 1u);
  EXPECT_EQ(answer_of(behind), answer_of(failed));
  EXPECT_TRUE(settles(*failed));
  EXPECT_LT(detail::clock::now() - begin, 10s);
  EXPECT_EQ(world.ends().size(), 1u);
}

TEST(WorldCore, EndsWhenItsOnlyRankGivesAnError) {
  const auto plan = std::make_shared<fault_plan>();
  core_system system{{.plan = plan}};
  a_world world{system, {}, 0, 1};
  world.open();
  plan->add({.on = verb::all_reduce, .error = errc::nccl_error});
  EXPECT_TRUE(has_code(answer_of(world.all_reduce()), errc::nccl_error));
  EXPECT_EQ(world.ends().size(), 1u);
}

// A communicator that is late must not stay on the devices.
TEST(WorldCore, LetsGoOfACommunicatorThatWasNotConnectedInTime) {
  core_system system{{.devices = 2}};
  a_world world{system, {.build_deadline = 50ms}};
  gate held;
  auto busy = system.device(1).launch(held.on_lane(), {}, {}, {});
  held.wait_reached();
  EXPECT_TRUE(has_code(world.build(), errc::deadline_exceeded));
  held.open();
  auto reset = system.device(0).reset({}); // waits for whoever holds the device
  EXPECT_TRUE(is_ok(answer_of(reset)));
}

TEST(WorldCore, RefusesWhatCannotBeRight) {
  core_system system{{.devices = 3}};
  a_world world{system};
  world.open();
  const auto refused = [&](const std::vector<any_gpu_ref>& send,
                           const std::vector<any_gpu_ref>& recv = {}) {
    auto op = world.core->all_reduce(send, recv, reduce_op::sum, {});
    EXPECT_TRUE(op->answered());
    return code_of(op->error());
  };
  EXPECT_EQ(refused({}), errc::invalid_argument);
  EXPECT_EQ(refused({world.refs[0]}), errc::invalid_argument);
  EXPECT_EQ(refused({world.refs[1], world.refs[0]}), errc::invalid_argument);
  EXPECT_EQ(refused({world.refs[0], any_gpu_ref{}}), errc::stale_ref);
  EXPECT_EQ(refused({world.refs[0], must(world.refs[1].slice(0, 3))}), errc::shape_mismatch);
  EXPECT_EQ(refused({world.refs[0], must(world.refs[1].reinterpret(dtype::float32))}),
            errc::shape_mismatch);
  const auto half = [&](std::size_t rank, std::size_t first) {
    return must(world.refs[rank].slice(first, 32));
  };
  EXPECT_EQ(refused({half(0, 0), half(1, 0)}, {half(0, 16), half(1, 16)}), errc::invalid_argument);
  EXPECT_FALSE(world.core
                   ->all_reduce(std::vector{half(0, 0), half(1, 0)},
                                std::vector{half(0, 32), half(1, 32)}, reduce_op::sum, {})
                   ->error());
}

// Two worlds on the same devices, and much else: one order, no cycle.
TEST(WorldCore, SharesDevicesWithAnother) {
  core_system system{{.devices = 2}};
  a_world a{system};
  a_world b{system};
  a.open();
  b.open();
  std::vector<std::thread> clients;
  for (auto* world : {&a, &b, &a, &b})
    clients.emplace_back([world] {
      std::vector<std::shared_ptr<detail::operation_of<collective_done>>> all;
      for (int i = 0; i < 200; ++i)
        all.push_back(world->all_reduce());
      for (auto& x : all)
        EXPECT_TRUE(is_ok(answer_of(x)));
    });
  for (auto& x : clients)
    x.join();
}

} // namespace

} // namespace troupe
