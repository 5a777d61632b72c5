/// The core of a world: requests that wait for a communicator, and how a communicator ends.
#include "device/operations.hpp"
#include "support/core_fixture.hpp"
#include "world/world_core.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <ctime>
#include <future>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
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
using testing::patience;
using testing::same_bytes;
using testing::settles;
using testing::verb;
using namespace std::chrono_literals;

std::shared_ptr<detail::operation_of<collective_done>>
all_reduce_in(world_core& world, const std::vector<any_gpu_ref>& send,
              const std::vector<any_gpu_ref>& recv, reduce_op op, request_options options = {}) {
  return world.run({collective_kind::all_reduce, send, recv, op, {}}, options);
}

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
    core->set_on_end([this](std::uint64_t epoch, const caf::error& why, detail::communicator_role) {
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
    return core->run({collective_kind::all_reduce, refs, {}, reduce_op::sum, {}},
                     {.deadline = deadline});
  }
  /// Starts an all-reduce of the `i`-th element alone.
  std::shared_ptr<detail::operation_of<collective_done>>
  all_reduce_element(std::size_t i, std::chrono::nanoseconds deadline = 30s) {
    std::vector<any_gpu_ref> elements;
    for (auto& ref : refs)
      elements.push_back(must(ref.slice(i, 1)));
    return all_reduce_in(*core, elements, {}, reduce_op::sum,
                         {.deadline = deadline, .room = room_policy::refuse});
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

TEST(WorldCore, FreesItsOperationsWithoutAnotherCall) {
  core_system system{{.devices = 2}};
  a_world world{system};
  world.open();
  std::vector<std::weak_ptr<detail::operation>> all;
  for (std::size_t i = 0; i < 20; ++i)
    all.push_back(world.all_reduce_element(i));
  for (auto& x : all)
    EXPECT_TRUE(eventually([&] { return x.expired(); }));
}

TEST(WorldCore, KeepsWhatComesBeforeItsCommunicator) {
  core_system system{{.devices = 2}};
  a_world world{system};
  std::vector<std::shared_ptr<detail::operation_of<collective_done>>> early;
  for (std::size_t i = 0; i < 20; ++i)
    early.push_back(world.all_reduce_element(i));
  early[3]->cancel();
  EXPECT_TRUE(has_code(answer_of(early[3]), errc::cancelled));
  auto late = world.all_reduce_element(20, 20ms);
  EXPECT_TRUE(has_code(answer_of(late), errc::deadline_exceeded)); // no communicator issues it
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
  EXPECT_TRUE(eventually([&] { return system.deadlines().size() == 0; }));
}

TEST(WorldCore, BoundsThoseWhoWait) {
  core_system system{{.devices = 2}};
  a_world world{system, {.waiting_limit = 10}};
  std::vector<std::shared_ptr<detail::operation_of<collective_done>>> waiting;
  for (std::size_t i = 0; i < 10; ++i)
    waiting.push_back(world.all_reduce_element(i));
  EXPECT_TRUE(has_code(answer_of(world.all_reduce_element(10)), errc::overloaded));
  waiting[4]->cancel();
  waiting[5]->cancel();
  auto a = world.all_reduce_element(11); // these find room again
  auto b = world.all_reduce_element(12);
  EXPECT_FALSE(a->completed());
  EXPECT_FALSE(b->completed());
  EXPECT_TRUE(has_code(answer_of(world.all_reduce_element(14)), errc::overloaded));
  world.open();
  EXPECT_TRUE(is_ok(answer_of(a)));
  EXPECT_TRUE(is_ok(answer_of(b)));
  EXPECT_TRUE(is_ok(answer_of(waiting[9])));
}

/// How a request that waits for its world's communicator affects the buffers that it uses.
class WaitingRequest : public ::testing::Test {
protected:
  std::shared_ptr<detail::operation_of<detail::nothing>> fill(const any_gpu_ref& ref,
                                                              std::int32_t value) const {
    return system.device(ref.device()).fill(ref, value, {});
  }
  /// A download that has been started.
  struct reading {
    std::shared_ptr<std::vector<std::int32_t>> values;
    std::shared_ptr<detail::operation_of<detail::nothing>> op;

    std::int32_t value() const {
      must(answer_of(op));
      for (auto x : *values)
        EXPECT_EQ(x, values->front());
      return values->front();
    }
  };
  reading read(const any_gpu_ref& ref) const {
    auto values = std::make_shared<std::vector<std::int32_t>>(ref.count(), -1);
    return {values, system.device(ref.device()).download(ref, borrow(*values), {})};
  }

  core_system system{{.devices = 2}};
  a_world world{system};
  any_gpu_ref x = world.refs[0];
};

// INV-12: operations behind it see its result.
TEST_F(WaitingRequest, KeepsItsPlaceOnItsBuffers) {
  for (auto& ref : world.refs)
    must(answer_of(fill(ref, 3)));
  auto sum = world.all_reduce();
  auto after = read(x);
  auto overwritten = fill(x, 100);
  auto last = read(x);
  must(answer_of(system.device(0).stats({}))); // the lane still runs other operations
  EXPECT_FALSE(sum->completed());
  EXPECT_FALSE(after.op->completed());
  EXPECT_FALSE(overwritten->completed());
  EXPECT_FALSE(last.op->completed());
  world.open();
  EXPECT_EQ(after.value(), 6);
  EXPECT_EQ(last.value(), 100);
  EXPECT_EQ(read(world.refs[1]).value(), 6);
}

TEST_F(WaitingRequest, LetsPassWhatDoesNotConflict) {
  std::vector<any_gpu_ref> results;
  for (int i = 0; i < 2; ++i) {
    auto op = system.device(i).allocate(a_world::count, dtype::int32, true, {});
    must(answer_of(op));
    results.push_back(op->value);
    must(answer_of(fill(world.refs[static_cast<std::size_t>(i)], 4)));
  }
  auto sum = all_reduce_in(*world.core, world.refs, results, reduce_op::sum);
  EXPECT_EQ(read(x).value(), 4); // the all-reduce only reads this buffer
  auto result = read(results[0]);
  auto change = fill(x, 50);
  EXPECT_FALSE(result.op->completed());
  EXPECT_FALSE(change->completed());
  world.open();
  EXPECT_EQ(result.value(), 8);
  EXPECT_EQ(read(x).value(), 50);
}

TEST_F(WaitingRequest, TakenBackIsAsIfItHadNeverBeen) {
  must(answer_of(fill(x, 7)));
  auto sum = world.all_reduce();
  auto reader = read(x);
  auto writer = fill(x, 8);
  sum->cancel();
  EXPECT_TRUE(has_code(answer_of(sum), errc::cancelled));
  EXPECT_EQ(reader.value(), 7);
  EXPECT_TRUE(is_ok(answer_of(writer)));
  EXPECT_EQ(read(x).value(), 8); // although the world was never ready
  EXPECT_TRUE(settles(*sum));
}

TEST_F(WaitingRequest, OverItsDeadlineFreesItsBuffers) {
  auto sum = world.all_reduce();
  auto reader = read(x);
  sum->expire();
  EXPECT_TRUE(has_code(answer_of(sum), errc::deadline_exceeded));
  EXPECT_TRUE(has_code(answer_of(reader.op), errc::deadline_exceeded));
  EXPECT_TRUE(is_ok(answer_of(fill(x, 1))));
}

// INV-7
TEST_F(WaitingRequest, EndsWithItsWorld) {
  auto sum = world.all_reduce();
  auto reader = read(x);
  auto writer = fill(x, 9);
  const auto why = make_error(errc::unavailable, "on purpose");
  world.core->close(world_phase::failed, why);
  EXPECT_EQ(answer_of(sum), why);
  EXPECT_EQ(answer_of(reader.op), why);
  EXPECT_TRUE(is_ok(answer_of(writer)));
  EXPECT_EQ(read(x).value(), 9);
}

TEST_F(WaitingRequest, IsStaleWhenItsDeviceIsReset) {
  auto sum = world.all_reduce();
  auto reader = read(x);
  auto reset = system.device(0).reset({});
  EXPECT_TRUE(is_ok(answer_of(reset)));
  EXPECT_TRUE(has_code(answer_of(sum), errc::device_reset));
  EXPECT_TRUE(has_code(answer_of(reader.op), errc::device_reset));
  EXPECT_TRUE(is_ok(answer_of(fill(world.refs[1], 1))));
  EXPECT_TRUE(settles(*sum));
}

// A buffer whose acquire may still fail cannot be released.
TEST_F(WaitingRequest, ReleaseComesAfterAcquire) {
  auto sum = world.all_reduce();
  auto lane = system.lane(0);
  const auto start = [&](auto op) {
    op->parts()[0].on = lane.get();
    op->deadline = detail::clock::now() + patience;
    system.runtime()->start(op);
    return op;
  };
  const auto user = lane->stream(detail::stream_kind::compute);
  auto acquire = start(std::make_shared<detail::acquire_operation>(x, access_mode::read, user));
  const auto release = [&] {
    return answer_of(start(std::make_shared<detail::release_operation>(
        x, access_mode::read, must(lane->mark_user(user)))));
  };
  EXPECT_TRUE(has_code(release(), errc::invalid_argument));
  sum->expire(); // fails the acquire, which reads after it
  EXPECT_TRUE(has_code(answer_of(acquire), errc::deadline_exceeded));
  EXPECT_TRUE(settles(*acquire));
  EXPECT_TRUE(eventually([&] { return lane->state().acquired() == 0; }));
  EXPECT_TRUE(is_ok(answer_of(fill(x, 1))));
  acquire = start(std::make_shared<detail::acquire_operation>(x, access_mode::read, user));
  EXPECT_TRUE(is_ok(answer_of(acquire)));
  EXPECT_TRUE(is_ok(release()));
  EXPECT_TRUE(has_code(release(), errc::invalid_argument));
  EXPECT_EQ(lane->state().acquired(), 0);
}

TEST_F(WaitingRequest, EndsWithTheSystem) {
  auto sum = world.all_reduce();
  auto reader = read(x);
  system.runtime()->close();
  EXPECT_TRUE(has_code(answer_of(sum), errc::unavailable));
  EXPECT_TRUE(has_code(answer_of(reader.op), errc::unavailable));
  EXPECT_TRUE(settles(*sum));
  EXPECT_TRUE(settles(*reader.op));
}

// INV-7, although it waits behind a request of a world that has not ended.
TEST_F(WaitingRequest, BehindAnotherEndsWithItsWorld) {
  a_world second{system};
  second.open();
  auto sum = world.all_reduce();
  auto behind = all_reduce_in(*second.core, world.refs, {}, reduce_op::sum);
  const auto why = make_error(errc::unavailable, "on purpose");
  second.core->close(world_phase::failed, why);
  EXPECT_EQ(answer_of(behind), why);
  EXPECT_FALSE(sum->completed());
}

// INV-1: when many requests end at once, the time grows linearly, not quadratically.
TEST_F(WaitingRequest, EndsInTimeAlsoAmongThousands) {
  constexpr std::size_t few = 500;
  constexpr std::size_t many = 7 * few; // with the few, less than what may wait for a device
  std::vector<any_gpu_ref> wide;
  for (int i = 0; i < 2; ++i) {
    auto op = system.device(i).allocate(few + many, dtype::int32, true, {});
    must(answer_of(op));
    wide.push_back(op->value);
  }
  const auto processor_time_of = [&](std::size_t requests, std::size_t first) {
    const auto begin = std::clock();
    const auto until = detail::clock::now() + 1s;
    std::vector<std::shared_ptr<detail::completion>> all;
    for (std::size_t i = 0; i < requests; ++i)
      all.push_back(all_reduce_in(
          *world.core, {must(wide[0].slice(first + i, 1)), must(wide[1].slice(first + i, 1))}, {},
          reduce_op::sum, {.deadline = until - detail::clock::now(), .room = room_policy::refuse}));
    for (auto& op : all)
      EXPECT_TRUE(has_code(answer_of(op), errc::deadline_exceeded));
    return std::clock() - begin;
  };
  const auto alone = processor_time_of(few, 0);
  EXPECT_LT(processor_time_of(many, few), 3 * 7 * alone);
}

// If a lane waited for the first world, it would delay the connections of the second.
TEST_F(WaitingRequest, HoldsUpNoOtherWorld) {
  a_world second{system};
  auto sum = world.all_reduce();
  auto behind = all_reduce_in(*second.core, world.refs, {}, reduce_op::sum);
  second.open();
  EXPECT_TRUE(is_ok(answer_of(second.all_reduce())));
  EXPECT_FALSE(behind->completed());
  world.open();
  EXPECT_TRUE(is_ok(answer_of(sum)));
  EXPECT_TRUE(is_ok(answer_of(behind)));
}

// In any sequence, a reader sees the writes before it and none after it.
TEST_F(WaitingRequest, KeepsEveryPlaceInLongRows) {
  for (unsigned seed = 1; seed <= 40; ++seed) {
    a_world first{system};
    a_world second{system};
    std::array<a_world*, 2> worlds{&first, &second};
    std::array<std::vector<any_gpu_ref>, 2> sets{first.refs, second.refs};
    std::array<std::array<std::int32_t, 2>, 2> model{}; // by set and rank
    std::vector<std::pair<reading, std::int32_t>> readings;
    std::vector<std::shared_ptr<detail::completion>> sums;
    std::mt19937 random{seed};
    const auto pick = [&](unsigned n) { return std::size_t{random() % n}; };
    const auto opens = std::array{pick(150), pick(150)};
    for (std::size_t step = 0; step < 150; ++step) {
      for (std::size_t i = 0; i < 2; ++i)
        if (step == opens[i])
          worlds[i]->open();
      auto set = pick(2);
      auto rank = pick(2);
      auto& here = model[set];
      switch (pick(4)) {
      case 0:
        here[rank] = static_cast<std::int32_t>(pick(100));
        static_cast<void>(fill(sets[set][rank], here[rank]));
        break;
      case 1: // in place
        sums.push_back(all_reduce_in(*worlds[pick(2)]->core, sets[set], {}, reduce_op::max));
        here[0] = here[1] = std::max(here[0], here[1]);
        break;
      case 2: // from one set to the other
        sums.push_back(
            all_reduce_in(*worlds[pick(2)]->core, sets[set], sets[1 - set], reduce_op::max));
        model[1 - set][0] = model[1 - set][1] = std::max(here[0], here[1]);
        break;
      default:
        readings.emplace_back(read(sets[set][rank]), here[rank]);
        break;
      }
    }
    for (auto& [got, expected] : readings)
      ASSERT_EQ(got.value(), expected) << "seed " << seed;
    for (auto& sum : sums)
      ASSERT_TRUE(is_ok(answer_of(sum)));
  }
}

// INV-1: races between the end of the world, its opening, deadlines and cancellations.
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
      static_cast<void>(answer_of(x));
    EXPECT_TRUE(eventually([&] { return answers == 40; }));
    world.core->close(world_phase::shut_down, make_error(errc::unavailable, "over"));
    ASSERT_TRUE(eventually([&] { return system.deadlines().size() == 0; })) << "round " << round;
    EXPECT_TRUE(has_code(answer_of(world.all_reduce()), errc::unavailable));
  }
}

// INV-7
TEST(WorldCore, EndsForOneCauseWhenARankStands) {
  const auto plan = std::make_shared<fault_plan>();
  core_system system{{.devices = 2, .plan = plan}};
  a_world world{system, {.stall_limit = 500ms}};
  world.open();
  must(answer_of(world.all_reduce()));
  plan->add({.kind = fault::not_issued, .on = verb::collective, .device = 1});
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
    EXPECT_TRUE(settles(*x)); // after the communicator is aborted
  EXPECT_TRUE(eventually([&] { return !world.refs[0].access(); }));
  EXPECT_TRUE(has_code(world.refs[0].access(), errc::indeterminate));
  for (std::size_t i = 0; i < 2; ++i)
    must(answer_of(
        system.device(static_cast<int>(i)).fill(world.refs[i], same_bytes(world.refs[i]), {})));
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
  plan->add({.on = verb::collective, .device = 1, .error = errc::nccl_error});
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
  plan->add({.on = verb::collective, .error = errc::nccl_error});
  EXPECT_TRUE(has_code(answer_of(world.all_reduce()), errc::nccl_error));
  EXPECT_EQ(world.ends().size(), 1u);
}

// A communicator that is not ready in time must release the devices.
TEST(WorldCore, LetsGoOfACommunicatorThatWasNotConnectedInTime) {
  core_system system{{.devices = 2}};
  a_world world{system, {.build_deadline = 50ms}};
  gate held;
  auto busy = system.device(1).launch(held.on_lane(), {}, {}, {});
  held.wait_reached();
  EXPECT_TRUE(has_code(world.build(), errc::deadline_exceeded));
  held.open();
  auto reset = system.device(0).reset({}); // waits for all users of the device
  EXPECT_TRUE(is_ok(answer_of(reset)));
}

// The call that connects blocks until all ranks have entered it. If a lane entered it and waited
// there for a busy rank, the end of the world would treat that lane as stuck.
TEST(WorldCore, WaitsForABusyRankOutsideOfItsCommunicator) {
  const auto plan = std::make_shared<fault_plan>();
  plan->add({.kind = fault::block, .on = verb::connect, .device = 0});
  core_system system{{.devices = 2, .plan = plan}};
  a_world world{system, {.quiet_limit = 20ms}};
  gate held;
  auto busy = system.device(1).launch(held.on_lane(), {}, {}, {});
  held.wait_reached();
  std::promise<caf::error> built;
  world.core->build([&](std::uint64_t, const caf::error& why) { built.set_value(why); });
  ASSERT_TRUE(eventually([&] { return system.lane(0)->at_work(); }));
  EXPECT_EQ(plan->injected(fault::block), 0u);
  const auto why = make_error(errc::unavailable, "on purpose");
  world.core->close(world_phase::failed, why);
  EXPECT_EQ(built.get_future().get(), why);
  EXPECT_TRUE(is_ok(answer_of(system.device(0).reset({})))); // the communicator no longer exists
  EXPECT_FALSE(system.runtime()->ended());
}

// Otherwise the last rank would be alone in the connect call.
TEST(WorldCore, DoesNothingElseOnALaneThatIsAboutToConnect) {
  core_system system{{.devices = 2}};
  a_world world{system};
  gate busy;
  auto holding = system.device(0).launch(busy.on_lane(), {}, {}, {});
  busy.wait_reached();
  std::promise<caf::error> built;
  world.core->build([&](std::uint64_t, const caf::error& why) { built.set_value(why); });
  ASSERT_TRUE(eventually([&] { return system.lane(1)->at_work(); }));
  auto behind = system.device(1).stats({.deadline = 50ms});
  EXPECT_TRUE(has_code(answer_of(behind), errc::deadline_exceeded));
  busy.open();
  EXPECT_TRUE(is_ok(built.get_future().get()));
  EXPECT_TRUE(is_ok(answer_of(system.device(1).stats({}))));
}

TEST(WorldCore, NamesTheRankThatDoesNotConnect) {
  core_system system{{.devices = 3}};
  a_world world{system, {.connect_limit = 500ms}, 0, 3};
  gate busy;
  auto holding = system.device(1).launch(busy.on_lane(), {}, {}, {});
  busy.wait_reached();
  const auto why = failure_of(world.build()).value();
  EXPECT_EQ(why.code, errc::stalled);
  EXPECT_EQ(why.rank, 1);
  EXPECT_EQ(why.device, 1);
}

// Requests that wait for the communicator must not prevent its connection.
TEST(WorldCore, ConnectsWhenNothingElseHasRoom) {
  core_system system{{.devices = 2, .lanes = {.queue_limit = 64}}};
  a_world world{system, {.waiting_limit = 64}};
  std::vector<std::shared_ptr<detail::operation_of<collective_done>>> waiting;
  for (int i = 0; i < 64; ++i)
    waiting.push_back(world.all_reduce());
  EXPECT_TRUE(
      has_code(answer_of(system.device(0).stats({.room = room_policy::refuse})), errc::overloaded));
  world.open();
  for (auto& x : waiting)
    EXPECT_TRUE(is_ok(answer_of(x)));
}

TEST(WorldCore, RefusesWhatCannotBeRight) {
  core_system system{{.devices = 3}};
  a_world world{system};
  world.open();
  const auto refused = [&](const std::vector<any_gpu_ref>& send,
                           const std::vector<any_gpu_ref>& recv = {}) {
    auto op = all_reduce_in(*world.core, send, recv, reduce_op::sum);
    EXPECT_TRUE(op->completed());
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
  EXPECT_FALSE(all_reduce_in(*world.core, {half(0, 0), half(1, 0)}, {half(0, 32), half(1, 32)},
                             reduce_op::sum)
                   ->error());
}

TEST(WorldCore, IsNotKeptByACallThatLacksTheOthers) {
  core_system system{{.devices = 2}};
  std::weak_ptr<world_core> core;
  std::shared_ptr<detail::operation_of<collective_done>> alone;
  {
    a_world world{system};
    world.open();
    core = world.core;
    alone = world.core->run(
        0, {collective_kind::all_reduce, world.refs[0], any_gpu_ref{}, reduce_op::sum, -1}, {},
        world.core);
    system.runtime()->admissions().drain();
  }
  EXPECT_TRUE(has_code(answer_of(alone), errc::unavailable));
  alone.reset();
  EXPECT_TRUE(eventually([&] { return core.expired(); }));
}

// Two worlds on the same devices with mixed load: one order, no cycle.
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
