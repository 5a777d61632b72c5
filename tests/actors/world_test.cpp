// A world: its generations, its all-reduce, and the effects of failures on both.

#include "support/eventually.hpp"
#include "support/world_fixture.hpp"
#include <troupe/detail/caf_compat.hpp>

#include <caf/actor_registry.hpp>

#include <algorithm>
#include <atomic>
#include <optional>
#include <random>
#include <set>
#include <thread>

namespace troupe::testing {
namespace {

constexpr std::size_t count = 1000;

std::vector<any_gpu_ref> zeros(const world& on, std::size_t n = count) {
  return must(on.allocate(dtype::float32, n, true));
}

all_reduce sum_of(const std::vector<any_gpu_ref>& refs, request_options options = {}) {
  return {refs, {}, reduce_op::sum, options};
}

/// Returns the phases of the notifications, without repetitions.
std::vector<world_phase> phases(const std::vector<world_status>& seen) {
  std::vector<world_phase> result;
  for (auto& x : seen)
    if (result.empty() || result.back() != x.phase)
      result.push_back(x.phase);
  return result;
}

/// Returns the error of the requests, which must all have the same cause.
template <class T> caf::error common_error(const std::vector<pending<T>>& all) {
  caf::error first;
  for (auto& x : all) {
    const auto why = error_of(answer_of(x));
    EXPECT_TRUE(why);
    if (!first)
      first = why;
    EXPECT_EQ(describe(why), describe(first));
  }
  return first;
}

// -- readiness

TEST(World, IsReadyWhenItIsOpen) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system{{.devices = 4}};
  auto w = system.open_world({.name = "gradients"});
  const auto status = w.status();
  EXPECT_EQ(status.name, "gradients");
  EXPECT_EQ(status.phase, world_phase::ready);
  EXPECT_EQ(status.epoch, 1u);
  EXPECT_EQ(status.membership, 1u);
  EXPECT_TRUE(is_ok(status.reason));
  ASSERT_EQ(status.members.size(), w.size());
  ASSERT_EQ(w.size(), system.ordinals().size());
  for (std::size_t i = 0; i < w.size(); ++i) {
    EXPECT_EQ(status.members[i], (world_member{static_cast<int>(i), static_cast<int>(i), 1, 1}));
    EXPECT_EQ(w.device_of(i).ordinal(), static_cast<int>(i));
  }
  const auto told = must(ask<world_status>(system, w.actor(), get_status{}));
  EXPECT_EQ(told.members, status.members);
  EXPECT_EQ(told.phase, world_phase::ready);
  EXPECT_TRUE(works(w));
}

TEST(World, HasItsRanksInTheOrderGiven) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system;
  auto w = system.open_world({.devices = {1, 0}});
  EXPECT_EQ(w.device_of(0).ordinal(), 1);
  EXPECT_EQ(w.device_of(1).ordinal(), 0);
  EXPECT_TRUE(works(w));
}

TEST(World, TellsItsSubscribersThatItIsReady) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system;
  auto actor = system.spawn_world();
  world_feed early{system, actor};
  const auto ready = early.until(world_phase::ready);
  EXPECT_EQ(ready.epoch, 1u);
  world_feed late{system, actor};
  late.until(world_phase::ready);
  EXPECT_EQ(late.seen().size(), 1u);
  detail::anon_send(actor, shutdown{});
  early.until(world_phase::shut_down);
  late.until(world_phase::shut_down);
  EXPECT_EQ(phases(late.seen()), (std::vector{world_phase::ready, world_phase::shut_down}));
}

TEST(World, TellsItsPhasesInOrder) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan = std::make_shared<fault_plan>(0, std::vector<fault_rule>{{fault::block, verb::build}});
  test_system system{{.faults = plan}};
  auto actor = system.spawn_world();
  world_feed feed{system, actor};
  EXPECT_EQ(feed.until([](auto&) { return true; }).phase, world_phase::building);
  ASSERT_TRUE(plan->wait_injected(fault::block, 1, patience));
  plan->release();
  const auto ready = feed.until(world_phase::ready);
  system.open(1).shutdown();
  const auto failed = feed.until(world_phase::failed);
  EXPECT_TRUE(has_code(failed.reason, errc::unavailable));
  EXPECT_EQ(phases(feed.seen()),
            (std::vector{world_phase::building, world_phase::ready, world_phase::failed}));
  caf::anon_send_exit(actor, caf::exit_reason::user_shutdown);
}

// Requests wait for the communicator, in order.
TEST(World, BuildsWhileRequestsWait) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan = std::make_shared<fault_plan>(0, std::vector<fault_rule>{{fault::block, verb::build}});
  test_system system{{.faults = plan}};
  auto actor = system.spawn_world();
  ASSERT_TRUE(plan->wait_injected(fault::block, 1, patience));
  std::vector<any_gpu_ref> refs;
  for (auto i : system.ordinals()) {
    auto d = system.open(i);
    refs.push_back(must(answer_of(d.allocate(dtype::float32, count))));
    EXPECT_TRUE(is_ok(answer_of(d.fill(must(gpu_ref<float>::from(refs.back())), 1.F))));
  }
  caf::scoped_actor self{system.get()};
  auto late = ask<collective_done>(system, actor, sum_of(refs, {.deadline = 20ms}));
  EXPECT_TRUE(has_code(late, errc::deadline_exceeded));
  for (auto& x : refs)
    accept_bytes(system, x);
  auto first = detail::request(self, actor, patience, sum_of(refs));
  auto second = detail::request(self, actor, patience, sum_of(refs));
  plan->release();
  std::uint64_t operation = 0;
  for (auto* x : {&first, &second})
    std::move(*x).receive(
        [&](const collective_done& done) {
          EXPECT_GT(done.operation, operation);
          EXPECT_EQ(done.epoch, 1u);
          EXPECT_EQ(done.way, collectives_of_run() == collectives_policy::nccl
                                  ? collective_way::nccl
                                  : collective_way::direct);
          operation = done.operation;
        },
        [](const caf::error& why) { ADD_FAILURE() << describe(why); });
  for (std::size_t i = 0; i < refs.size(); ++i)
    EXPECT_EQ(must(system.open(static_cast<int>(i)).download(must(gpu_ref<float>::from(refs[i])))),
              std::vector<float>(count, 4.F));
  caf::anon_send_exit(actor, caf::exit_reason::user_shutdown);
}

TEST(World, BuildDeadlineNamesWhatIsMissing) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan =
      std::make_shared<fault_plan>(0, std::vector<fault_rule>{{fault::block, verb::bind, 1}});
  test_system system{{.faults = plan}};
  world_config config;
  config.limits.build_deadline = 50ms;
  stopwatch watch;
  auto w = system.try_open_world(config);
  EXPECT_LT(watch.elapsed(), at_once);
  ASSERT_TRUE(has_code(w, errc::deadline_exceeded));
  const auto text = describe(error_of(w)); // may name device 0 too
  EXPECT_TRUE(text.find("device 1") != text.npos || text.find(", 1") != text.npos) << text;
  plan->release();
  auto next = system.open_world();
  EXPECT_TRUE(works(next));
}

TEST(World, BuildDeadlineOfACommunicator) {
  TROUPE_HOST_ONLY("a fault plan");
  for (auto what : {verb::build, verb::connect}) {
    auto plan = std::make_shared<fault_plan>(
        0, std::vector<fault_rule>{{what == verb::build ? fault::block : fault::hang, what}});
    test_system system{{.faults = plan}};
    for (auto ordinal : system.ordinals()) // a worker may need longer to start
      EXPECT_TRUE(works(system.open(ordinal)));
    world_config config;
    config.limits.build_deadline = 50ms;
    EXPECT_TRUE(has_code(system.try_open_world(config), errc::deadline_exceeded));
    plan->release();
    auto next = system.open_world();
    EXPECT_TRUE(works(next));
  }
}

TEST(World, BuildsAgainAfterABuildFailed) {
  TROUPE_HOST_ONLY("a fault plan");
  for (auto what : {verb::build, verb::connect}) {
    auto plan = std::make_shared<fault_plan>(
        0, std::vector<fault_rule>{{fault::fail, what, any_device, 1, 1}});
    test_system system{{.faults = plan}};
    world_config config;
    config.limits.restart_backoff = 1ms;
    auto w = system.try_open_world(config);
    ASSERT_TRUE(is_ok(w));
    EXPECT_GE(w->status().epoch, 2u);
    EXPECT_TRUE(works(*w));
  }
}

TEST(World, FailsWhenItCannotBeBuilt) {
  TROUPE_HOST_ONLY("a fault plan");
  for (auto what : {verb::build, verb::connect}) {
    auto plan = std::make_shared<fault_plan>(
        0, std::vector<fault_rule>{{fault::fail, what, any_device, 1, forever}});
    test_system system{{.faults = plan}};
    world_config config;
    config.limits.restarts = 3;
    config.limits.restart_backoff = 1ms;
    auto w = system.try_open_world(config);
    ASSERT_TRUE(has_code(w, errc::nccl_error));
    EXPECT_NE(describe(error_of(w)).find("injected"), std::string::npos) << describe(error_of(w));
    if (what == verb::build) {
      EXPECT_EQ(plan->injected(), 4u); // the first build and three restarts
    }
    EXPECT_TRUE(works(system.open()));
  }
}

TEST(World, SaysThatItCouldNotBeBuiltForLackOfMemory) {
  TROUPE_HOST_ONLY("a fault plan");
  for (auto what : {verb::build, verb::connect}) {
    auto plan = std::make_shared<fault_plan>(
        0, std::vector<fault_rule>{{fault::out_of_memory, what, any_device, 1, forever}});
    test_system system{{.faults = plan}};
    world_config config;
    config.limits.restarts = 1;
    config.limits.restart_backoff = 1ms;
    EXPECT_TRUE(has_code(system.try_open_world(config), errc::out_of_memory));
    plan->disarm();
    auto next = system.open_world();
    EXPECT_TRUE(works(next));
  }
}

/// A rank that found no memory during a call may have left it incomplete, so its communicator ends.
TEST(World, GoesOnAfterACollectiveFoundNoMemory) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan = std::make_shared<fault_plan>();
  plan->add({fault::block, verb::build, any_device, 2}); // of the next one, or of a standby
  test_system system{{.devices = 3, .faults = plan}};
  auto w = system.open_world();
  world_feed feed{system, w.actor()};
  auto refs = zeros(w);
  plan->add({fault::out_of_memory, verb::collective, 1});
  EXPECT_TRUE(has_code(answer_of(w.all_reduce(refs)), errc::out_of_memory));
  EXPECT_TRUE(has_code(feed.until(world_phase::building).reason, errc::out_of_memory));
  ASSERT_TRUE(plan->wait_injected(fault::block, 1, patience));
  plan->release();
  EXPECT_EQ(feed.until(world_phase::ready).epoch, 2u);
  EXPECT_TRUE(works(w));
}

TEST(World, AllocatesByMessage) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system;
  auto w = system.open_world();
  const auto all =
      must(ask<world_buffers>(system, w.actor(), allocate_all{count, dtype::float32, {true}, {}}));
  ASSERT_EQ(all.refs.size(), w.size());
  const std::vector<float> zero(count);
  for (std::size_t i = 0; i < w.size(); ++i)
    EXPECT_TRUE(holds(w.device_of(i), all.refs[i], zero));
  EXPECT_TRUE(is_ok(answer_of(w.all_reduce(all.refs))));
}

TEST(World, AllocatesWhileItBuilds) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan = std::make_shared<fault_plan>();
  plan->add({fault::block, verb::build});
  test_system system{{.faults = plan}};
  const auto actor = system.spawn_world();
  ASSERT_TRUE(plan->wait_injected(fault::block, 1, patience));
  const auto all =
      must(ask<world_buffers>(system, actor, allocate_all{count, dtype::float32, {true}, {}}));
  plan->release();
  EXPECT_TRUE(is_ok(ask<collective_done>(system, actor, all_reduce{.send = all.refs})));
  caf::anon_send_exit(actor, caf::exit_reason::user_shutdown);
}

TEST(World, GoesOnAfterARankFoundNoMemory) {
  TROUPE_NEEDS_DEVICES(2);
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.faults = plan}};
  auto w = system.open_world();
  plan->add({fault::out_of_memory, verb::allocate, 1});
  EXPECT_TRUE(has_code(w.allocate(dtype::float32, count), errc::out_of_memory));
  EXPECT_TRUE(has_code(w.allocate(dtype::float64, ~std::size_t{0}), errc::out_of_memory));
  EXPECT_TRUE(works(w));
  EXPECT_EQ(w.status().epoch, 1u);
}

TEST(World, FailsWhenADeviceDoesNotComeUp) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan = std::make_shared<fault_plan>(
      0, std::vector<fault_rule>{{fault::fail, verb::bind, 1, 1, forever}});
  system_options options{.faults = plan};
  options.lanes.open_backoff = 1ms;
  options.lanes.open_attempts = 2;
  test_system system{options};
  auto w = system.try_open_world();
  ASSERT_TRUE(has_code(w, errc::device_failed));
  EXPECT_EQ(failure_of(error_of(w))->device, 1);
}

TEST(World, OverDevicesThatTheApplicationHas) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system{{.devices = 4}};
  std::vector<device> mine;
  for (auto i = system.ordinals().rbegin(); i != system.ordinals().rend(); ++i)
    mine.push_back(system.open(*i));
  auto ref = must(mine[0].allocate<float>(count));
  EXPECT_TRUE(is_ok(answer_of(mine[0].fill(ref, 3.F))));
  {
    auto w = must(world::open(mine));
    EXPECT_EQ(w.device_of(0).ordinal(), mine[0].ordinal());
    EXPECT_TRUE(works(w));
    auto actor = must(spawn_nccl_world(mine));
    world_feed{system, actor}.until(world_phase::ready);
    caf::anon_send_exit(actor, caf::exit_reason::user_shutdown);
  }
  EXPECT_EQ(must(mine[0].download(ref)), std::vector<float>(count, 3.F));
  EXPECT_EQ(mine[0].generation(), 1u);
}

// A world's devices live as long as any handle to them.
TEST(World, GivesDevicesThatOutliveIt) {
  test_system system;
  std::optional<device> d;
  any_gpu_ref ref;
  {
    auto w = system.open_world();
    d = w.device_of(0);
    ref = zeros(w)[0];
  }
  EXPECT_TRUE(holds(*d, ref, std::vector<float>(count)));
  EXPECT_TRUE(is_ok(d->actor()));
}

// -- all-reduce

struct ranks_and_place {
  int ranks;
  bool in_place;
};

class WorldAllReduce : public ::testing::TestWithParam<ranks_and_place> {};

INSTANTIATE_TEST_SUITE_P(Ranks, WorldAllReduce,
                         ::testing::Values(ranks_and_place{1, true}, ranks_and_place{1, false},
                                           ranks_and_place{2, true}, ranks_and_place{2, false},
                                           ranks_and_place{3, false}, ranks_and_place{4, true},
                                           ranks_and_place{5, true}, ranks_and_place{7, false},
                                           ranks_and_place{8, true}, ranks_and_place{8, false}),
                         [](const auto& x) {
                           return std::to_string(x.param.ranks) +
                                  (x.param.in_place ? "InPlace" : "OutOfPlace");
                         });

TEST_P(WorldAllReduce, EveryTypeAndOperation) {
  const auto [ranks, in_place] = GetParam();
  TROUPE_NEEDS_DEVICES(ranks);
  test_system system{{.devices = ranks}};
  auto w = system.open_world();
  ASSERT_EQ(static_cast<int>(w.size()), ranks);
  std::uint64_t seed = 0;
  for (auto type : real_dtypes)
    for (auto op : all_reduce_ops)
      for (auto kind : {input_kind::any, input_kind::exact}) {
        const auto data =
            prepare(w, {.type = type, .op = op, .seed = ++seed, .kind = kind}, 131 + seed % 7);
        auto recv = data.send;
        if (!in_place) {
          recv = must(w.allocate(type, data.send[0].count()));
          for (std::size_t i = 0; i < w.size(); ++i)
            must(answer_of(w.device_of(i).fill(recv[i], same_bytes(recv[i], 0xff))));
        }
        auto done = in_place ? w.all_reduce(data.send, op) : w.all_reduce(data.send, recv, op);
        ASSERT_TRUE(is_ok(answer_of(done))) << to_string(type) << ' ' << to_string(op);
        ASSERT_TRUE(reduced(w, data, recv)) << to_string(type) << ' ' << to_string(op);
        for (std::size_t i = 0; i < w.size() && !in_place; ++i)
          ASSERT_TRUE(holds(w.device_of(i), data.send[i], data.inputs[i]));
      }
}

TEST(World, AllReducesAllSizes) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system{{.devices = 3}};
  auto w = system.open_world();
  for (std::size_t n : {1, 2, 3, 17, 4095, 4096, 4097, 65'537, 1'000'003}) {
    const auto data = prepare(w, {.type = dtype::int32, .op = reduce_op::sum, .seed = n}, n);
    ASSERT_TRUE(is_ok(answer_of(w.all_reduce(data.send))));
    ASSERT_TRUE(reduced(w, data, data.send)) << n;
  }
}

TEST(World, AllReducesSlices) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system;
  auto w = system.open_world();
  const auto data = prepare(w, {.type = dtype::float32, .op = reduce_op::max}, count);
  std::vector<any_gpu_ref> middle;
  auto part = data;
  for (std::size_t i = 0; i < w.size(); ++i) {
    middle.push_back(must(data.send[i].slice(100, 333)));
    part.inputs[i] = {data.inputs[i].begin() + 400, data.inputs[i].begin() + 400 + 4 * 333};
  }
  ASSERT_TRUE(is_ok(answer_of(w.all_reduce(middle, reduce_op::max))));
  EXPECT_TRUE(reduced(w, part, middle));
  for (std::size_t i = 0; i < w.size(); ++i) {
    EXPECT_TRUE(holds(w.device_of(i), must(data.send[i].slice(0, 100)),
                      std::span{data.inputs[i]}.subspan(0, 400)));
    EXPECT_TRUE(holds(w.device_of(i), must(data.send[i].slice(433, 567)),
                      std::span{data.inputs[i]}.subspan(4 * 433)));
  }
}

TEST(World, AllReducesTypedAndPipelined) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system;
  auto w = system.open_world();
  auto numbers = must(w.allocate<std::uint64_t>(count));
  for (std::size_t i = 0; i < w.size(); ++i)
    EXPECT_TRUE(is_ok(answer_of(w.device_of(i).fill(numbers[i], 1))));
  std::vector<pending<collective_done>> all;
  for (int i = 0; i < 40; ++i)
    all.push_back(w.all_reduce(numbers));
  std::uint64_t want = 1;
  for (int i = 0; i < 40; ++i)
    want *= w.size();
  std::uint64_t last = 0;
  for (auto& x : all) {
    const auto done = must(answer_of(x));
    EXPECT_EQ(done.epoch, 1u);
    EXPECT_EQ(done.membership, 1u);
    EXPECT_EQ(done.operation, x.number());
    EXPECT_GT(done.operation, last);
    last = done.operation;
  }
  for (std::size_t i = 0; i < w.size(); ++i)
    EXPECT_EQ(must(w.device_of(i).download(numbers[i])), std::vector<std::uint64_t>(count, want));
}

/// A client as in an application: sends a request to its world and reports the result.
class summing_actor : public detail::actor_base<> {
public:
  summing_actor(caf::actor_config& cfg, caf::actor to, all_reduce what,
                std::chrono::nanoseconds deadline, std::function<void(const caf::error&)> tell)
      : actor_base(cfg), to_(std::move(to)), what_(std::move(what)), deadline_(deadline),
        tell_(std::move(tell)) {}

  caf::behavior make_behavior() override {
    troupe::request(this, to_, what_, deadline_)
        .then([this](const collective_done&) { told({}); },
              [this](const caf::error& why) { told(why); });
    return with_exit([this](caf::exit_msg& x) { quit(x.reason); });
  }

private:
  void told(const caf::error& why) {
    tell_(why);
    quit();
  }

  caf::actor to_;
  all_reduce what_;
  std::chrono::nanoseconds deadline_;
  std::function<void(const caf::error&)> tell_;
};

TEST(World, AnswersActors) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system;
  auto w = system.open_world();
  for (std::uint64_t i = 0; i < 5; ++i) {
    const auto data = prepare(w, {.type = dtype::float64, .op = reduce_op::min, .seed = i}, count);
    flag told;
    caf::error got;
    system.get().spawn<summing_actor>(w.actor(), all_reduce{data.send, {}, reduce_op::min},
                                      patience, [&](const caf::error& why) {
                                        got = why;
                                        told.set();
                                      });
    ASSERT_TRUE(told.wait());
    EXPECT_TRUE(is_ok(got));
    EXPECT_TRUE(reduced(w, data, data.send));
  }
}

/// A world whose streams are blocked, so that none of its requests completes.
class HeldWorld : public ::testing::Test {
protected:
  void SetUp() override { TROUPE_NEEDS_DEVICES(2); }
  void TearDown() override { held.open(); }

  void open(world_config config = {}) {
    under_test.emplace(system.open_world(std::move(config)));
    refs = zeros(*under_test);
    other = zeros(*under_test);
  }

  /// Blocks the stream of rank 1 before work on `refs`.
  pending<void> hold() {
    auto result = held.hold_stream(under_test->device_of(1), {refs[1]}, {refs[1]});
    EXPECT_TRUE(held.wait_reached());
    return result;
  }

  test_system system;
  std::optional<world> under_test;
  std::vector<any_gpu_ref> refs;
  std::vector<any_gpu_ref> other;
  gate held;
};

// INV-1, INV-4
TEST_F(HeldWorld, DeadlineOfWhatRuns) {
  open();
  auto holding = hold();
  auto late = under_test->all_reduce(refs, reduce_op::sum, {.deadline = 50ms});
  auto answer = answer_of(late);
  ASSERT_TRUE(has_code(answer, errc::deadline_exceeded));
  const auto why = *failure_of(error_of(answer));
  EXPECT_EQ(why.operation, late.number());
  EXPECT_EQ(why.verb, "all_reduce");
  EXPECT_EQ(why.parts.size(), 2u);
  EXPECT_TRUE(
      has_code(ask<collective_done>(system, under_test->actor(), sum_of(refs, {.deadline = 50ms})),
               errc::deadline_exceeded));
  // Only these requests fail: there is no stall, and the communicator is the same.
  held.open();
  EXPECT_TRUE(is_ok(answer_of(holding)));
  EXPECT_TRUE(works(*under_test));
  EXPECT_EQ(under_test->status().epoch, 1u);
  EXPECT_TRUE(holds(under_test->device_of(0), refs[0], std::vector<float>(count)));
}

TEST_F(HeldWorld, CancelOfWhatRuns) {
  open();
  auto holding = hold();
  auto cancelled = under_test->all_reduce(refs);
  cancelled.cancel();
  EXPECT_TRUE(has_code(answer_of(cancelled), errc::cancelled));
  held.open();
  EXPECT_TRUE(is_ok(answer_of(holding)));
  EXPECT_TRUE(works(*under_test));
  EXPECT_EQ(under_test->status().epoch, 1u);
}

// INV-2: memory of a device's next generation may have the address of a stale handle.
TEST(World, AStaleHandleIsNotTakenForTheBufferAtItsAddress) {
  TROUPE_IN_PROCESS_ONLY("memory of the user");
  TROUPE_HOST_ONLY("memory of the host's");
  test_system system{{.devices = 1}};
  auto w = system.open_world();
  world_feed feed{system, w.actor()};
  auto d = w.device_of(0);
  std::vector<float> memory(count);
  auto before = must(d.adopt(memory.data(), count, [](void*) {})).any();
  must(answer_of(d.reset()));
  feed.until(world_phase::ready, 2);
  auto now = must(d.adopt(memory.data(), count, [](void*) {})).any();
  EXPECT_TRUE(before.stale());
  const std::vector stale{before};
  const std::vector fresh{now};
  EXPECT_TRUE(has_code(answer_of(w.all_reduce(stale, fresh)), errc::stale_ref));
  EXPECT_TRUE(has_code(answer_of(w.broadcast(before, fresh, 0)), errc::stale_ref));
  EXPECT_TRUE(has_code(answer_of(w.broadcast(now, stale, 0)), errc::stale_ref));
  EXPECT_TRUE(has_code(answer_of(w.rank(0).all_reduce(before, now)), errc::stale_ref));
  EXPECT_TRUE(has_code(now.access(), errc::skipped)); // by the sum that would have written it
  accept_bytes(d, now);
  EXPECT_TRUE(is_ok(answer_of(w.broadcast(now, fresh, 0))));
}

// The rank that fails to be issued does not continue with later calls, where it would meet calls of
// the other ranks.
TEST(World, ARankIsNotIssuedWhileAnotherIs) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan = std::make_shared<fault_plan>(
      0, std::vector<fault_rule>{
             {.kind = fault::block, .on = verb::collective, .device = 0},
             {.kind = fault::fail, .on = verb::collective, .device = 1, .error = errc::cuda_error},
         });
  test_system system{{.devices = 2, .faults = plan}};
  world_config config;
  config.limits.quiet_limit = std::chrono::seconds{10};
  auto w = system.open_world(config);
  const auto refs = zeros(w);
  gate held; // until the other rank is inside its call
  auto holding = held.hold_lane(w.device_of(1));
  ASSERT_TRUE(held.wait_reached());
  auto lost = w.all_reduce(refs);
  ASSERT_TRUE(plan->wait_injected(fault::block, 1, patience));
  held.open();
  const auto got = answer_of(lost);
  ASSERT_TRUE(has_code(got, errc::rank_not_issued));
  EXPECT_EQ(failure_of(got.error())->rank, 1);
  auto behind = w.barrier();
  plan->release();
  EXPECT_EQ(must(answer_of(behind)).epoch, 2u);
  EXPECT_TRUE(works(w));
}

// INV-9: the launch comes first and succeeds, whatever fails behind it on its buffers.
TEST(World, ALaunchDoesNotSeeAFailureBehindIt) {
  TROUPE_IN_PROCESS_ONLY("callables");
  TROUPE_HOST_ONLY("a fault plan");
  auto plan = std::make_shared<fault_plan>(
      0, std::vector<fault_rule>{{.kind = fault::fail, .on = verb::collective, .device = 1}});
  test_system system{{.devices = 2, .faults = plan}};
  auto w = system.open_world();
  auto refs = zeros(w);
  gate held;
  auto holding = held.hold_lane(w.device_of(0));
  ASSERT_TRUE(held.wait_reached());
  auto first = w.device_of(0).launch(
      [ref = refs[0]](launch_context&) {
        auto memory = ref.access();
        return memory ? caf::error{} : memory.error();
      },
      {refs[0]}, {refs[0]});
  auto behind = w.all_reduce(refs);
  EXPECT_TRUE(has_code(answer_of(behind), errc::nccl_error));
  EXPECT_FALSE(first.ready());
  held.open();
  EXPECT_TRUE(is_ok(answer_of(first)));
}

TEST_F(HeldWorld, ARequesterThatIsGone) {
  open();
  auto holding = hold();
  auto gone =
      system.get().spawn<summing_actor>(under_test->actor(), sum_of(refs), patience,
                                        [](const caf::error&) { ADD_FAILURE() << "it was gone"; });
  // The request was admitted before the reply to get_status.
  ASSERT_TRUE(is_ok(ask<world_status>(system, under_test->actor(), get_status{})));
  caf::anon_send_exit(gone, caf::exit_reason::kill);
  {
    caf::scoped_actor self{system.get()};
    self->wait_for(gone);
    detail::send(self, under_test->actor(), sum_of(refs)); // a request without a receiver
  }
  gone = nullptr;
  held.open();
  EXPECT_TRUE(is_ok(answer_of(holding)));
  EXPECT_TRUE(works(*under_test));
}

TEST_F(HeldWorld, ShutdownAnswersEverything) {
  open();
  auto holding = hold();
  std::vector<pending<collective_done>> all;
  for (int i = 0; i < 5; ++i)
    all.push_back(under_test->all_reduce(refs));
  world_feed feed{system, under_test->actor()};
  EXPECT_TRUE(is_ok(ask<void>(system, under_test->actor(), shutdown{})));
  EXPECT_TRUE(has_code(common_error(all), errc::unavailable));
  EXPECT_TRUE(has_code(feed.until(world_phase::shut_down).reason, errc::unavailable));
  held.open();
  EXPECT_TRUE(is_ok(answer_of(holding)));
  auto next = system.open_world();
  EXPECT_TRUE(works(next));
}

TEST_F(HeldWorld, TheLastCopyAnswersEverything) {
  open();
  auto holding = hold();
  std::vector<pending<collective_done>> all;
  for (int i = 0; i < 5; ++i)
    all.push_back(under_test->all_reduce(refs));
  under_test.reset();
  EXPECT_TRUE(has_code(common_error(all), errc::unavailable));
  held.open();
  EXPECT_TRUE(is_ok(answer_of(holding)));
}

TEST_F(HeldWorld, AKilledWorldAnswersEverything) {
  open();
  auto holding = hold();
  std::vector<pending<collective_done>> all;
  for (int i = 0; i < 5; ++i)
    all.push_back(under_test->all_reduce(refs));
  caf::scoped_actor self{system.get()};
  auto told = detail::request(self, under_test->actor(), patience, sum_of(refs));
  ASSERT_TRUE(is_ok(ask<world_status>(system, under_test->actor(), get_status{})));
  caf::anon_send_exit(under_test->actor(), caf::exit_reason::kill);
  EXPECT_TRUE(has_code(common_error(all), errc::unavailable));
  std::move(told).receive(
      [](const collective_done&) { ADD_FAILURE() << "it cannot be done"; },
      [](const caf::error& why) { EXPECT_TRUE(has_code(why, errc::unavailable)); });
  EXPECT_TRUE(has_code(answer_of(under_test->all_reduce(refs)), errc::unavailable));
  EXPECT_EQ(under_test->status().phase, world_phase::shut_down);
  held.open();
  EXPECT_TRUE(is_ok(answer_of(holding)));
  EXPECT_TRUE(works(system.open_world()));
}

// A device actor holds no requests: they complete without it, and a new actor replaces it.
TEST_F(HeldWorld, AKilledDeviceActorIsReplaced) {
  open();
  auto holding = hold();
  auto d = under_test->device_of(1);
  auto actor = must(d.actor());
  caf::scoped_actor self{system.get()};
  auto told = detail::request(self, actor, patience, fill{refs[1], 0.0f});
  ASSERT_TRUE(is_ok(ask<void>(system, actor, watch_generation{})));
  caf::anon_send_exit(actor, caf::exit_reason::kill);
  self->wait_for(actor);
  auto sum = under_test->all_reduce(refs);
  EXPECT_FALSE(sum.ready());
  held.open();
  std::move(told).receive([] {}, [](const caf::error& why) { ADD_FAILURE() << describe(why); });
  EXPECT_TRUE(is_ok(answer_of(sum)));
  EXPECT_TRUE(is_ok(answer_of(holding)));
  // The root is notified of the actor's death slightly later than this thread.
  caf::expected<device_stats> answer{caf::sec::request_receiver_down};
  for (stopwatch watch; !answer && watch.elapsed() < patience;)
    answer = ask<device_stats>(system, must(d.actor()), stats{});
  EXPECT_TRUE(is_ok(answer));
  EXPECT_TRUE(works(*under_test));
}

TEST_F(HeldWorld, AKilledRootAnswersEverything) {
  open();
  auto holding = hold();
  auto actor = must(under_test->device_of(1).actor());
  world_feed feed{system, under_test->actor()};
  std::vector<pending<collective_done>> all;
  for (int i = 0; i < 3; ++i)
    all.push_back(under_test->all_reduce(refs));
  caf::scoped_actor self{system.get()};
  auto of_device = detail::request(self, actor, patience, fill{refs[1], 0.0f});
  auto of_world = detail::request(self, under_test->actor(), patience, sum_of(refs));
  ASSERT_TRUE(is_ok(ask<void>(system, actor, watch_generation{})));
  ASSERT_TRUE(is_ok(ask<world_status>(system, under_test->actor(), get_status{})));
  caf::anon_send_exit(system.root(), caf::exit_reason::kill);
  auto ends = [](const caf::error& why) { EXPECT_TRUE(has_code(why, errc::unavailable)); };
  std::move(of_device).receive([] { ADD_FAILURE() << "it cannot be done"; }, ends);
  std::move(of_world).receive([](const collective_done&) { ADD_FAILURE() << "it cannot be done"; },
                              ends);
  EXPECT_TRUE(feed.until(world_phase::failed).reason);
  EXPECT_TRUE(common_error(all));
  EXPECT_TRUE(has_code(answer_of(under_test->all_reduce(refs)), errc::unavailable));
  held.open();
  EXPECT_TRUE(is_ok(answer_of(holding)));
}

// INV-9: one order for all operations, so no cycle over devices can form.
TEST(World, TwoOverTheSameDevicesFromManyThreads) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system{{.devices = 3}};
  std::vector<world> worlds;
  worlds.push_back(system.open_world());
  auto reversed = system.ordinals();
  std::reverse(reversed.begin(), reversed.end());
  worlds.push_back(system.open_world({.devices = reversed}));
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      auto& w = worlds[t % 2];
      for (std::uint64_t i = 0; i < 15; ++i) {
        const auto data = prepare(
            w, {.type = dtype::int64, .op = reduce_op::sum, .seed = 100 * t + i}, 1 + 97 * i);
        auto recv = must(w.allocate(dtype::int64, data.send[0].count()));
        auto first = w.all_reduce(data.send, recv);
        EXPECT_TRUE(is_ok(answer_of(first)));
        EXPECT_TRUE(reduced(w, data, recv));
      }
    });
  for (auto& x : threads)
    x.join();
  for (auto& w : worlds)
    EXPECT_EQ(w.status().epoch, 1u);
}

// -- stalls

world_config hasty() {
  world_config config;
  config.limits.stall_limit = 100ms;
  config.limits.restart_backoff = 1ms;
  // On a busy machine a lane needs time to return.
  config.limits.quiet_limit = std::chrono::seconds{10};
  return config;
}

class WorldStall : public ::testing::TestWithParam<fault> {};

INSTANTIATE_TEST_SUITE_P(Faults, WorldStall, ::testing::Values(fault::not_issued, fault::hang),
                         [](const auto& x) { return std::string{to_string(x.param)}; });

// INV-7
TEST_P(WorldStall, AnswersEverythingWithOneCauseAndGoesOn) {
  TROUPE_NEEDS_DEVICES(2);
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.devices = 3, .faults = plan}};
  auto config = hasty();
  config.limits.stall_limit = 500ms; // all requests are made within it
  auto w = system.open_world(config);
  world_feed feed{system, w.actor()};
  auto refs = zeros(w);
  auto untouched = prepare(w, {.type = dtype::float32, .op = reduce_op::sum}, count);
  plan->add({GetParam(), verb::collective, 1});
  std::vector<pending<collective_done>> all;
  all.push_back(w.all_reduce(refs));
  const auto culprit = all[0].number();
  for (int i = 0; i < 4; ++i)
    all.push_back(w.all_reduce(refs));
  caf::scoped_actor self{system.get()};
  auto told = detail::request(self, w.actor(), patience, sum_of(refs));
  const auto why = common_error(all);
  ASSERT_TRUE(has_code(why, errc::stalled));
  const auto f = *failure_of(why);
  EXPECT_EQ(f.operation, culprit);
  EXPECT_EQ(f.verb, "all_reduce");
  EXPECT_EQ(f.epoch, 1u);
  ASSERT_EQ(f.parts.size(), w.size());
  if (GetParam() == fault::hang || !on_cuda()) {
    // Its stream hangs and the other ranks wait for it: all of them have started.
    for (auto& x : f.parts)
      EXPECT_EQ(x, part_state::started);
  }
  std::move(told).receive([](const collective_done&) { ADD_FAILURE() << "it cannot be done"; },
                          [&](const caf::error& x) { EXPECT_TRUE(has_code(x, errc::stalled)); });
  // The world becomes ready again without any request.
  const auto again = feed.until(world_phase::ready, 2);
  EXPECT_EQ(again.epoch, 2u);
  EXPECT_EQ(again.membership, 1u);
  EXPECT_TRUE(eventually([&] { return is_ok(w.status().reason); })); // of a standby: it is replaced
  EXPECT_TRUE(has_code(get(w.device_of(0), refs[0]), errc::indeterminate));
  ASSERT_TRUE(is_ok(answer_of(w.all_reduce(untouched.send))));
  EXPECT_TRUE(reduced(w, untouched, untouched.send)); // other buffers keep their content
  EXPECT_TRUE(works(w));
  for (std::size_t i = 0; i < w.size(); ++i)
    EXPECT_EQ(w.device_of(i).generation(), 1u);
}

// A request during the rebuild waits for it.
TEST(WorldStall, RequestsWaitForTheNextCommunicator) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan = std::make_shared<fault_plan>();
  plan->add({fault::block, verb::build, any_device, 2}); // of the next one, or of a standby
  test_system system{{.faults = plan}};
  auto w = system.open_world(hasty());
  world_feed feed{system, w.actor()};
  auto data = prepare(w, {.type = dtype::float32, .op = reduce_op::sum}, count);
  auto refs = zeros(w);
  plan->add({fault::not_issued, verb::collective, 0});
  EXPECT_TRUE(has_code(answer_of(w.all_reduce(refs)), errc::stalled));
  ASSERT_TRUE(plan->wait_injected(fault::block, 1, patience));
  EXPECT_EQ(w.status().phase, world_phase::building);
  EXPECT_TRUE(has_code(w.status().reason, errc::stalled));
  auto next = w.all_reduce(data.send);
  auto cancelled = w.all_reduce(data.send);
  cancelled.cancel();
  EXPECT_TRUE(has_code(answer_of(cancelled), errc::cancelled));
  EXPECT_TRUE(has_code(answer_of(w.all_reduce(data.send, reduce_op::sum, {.deadline = 10ms})),
                       errc::deadline_exceeded));
  plan->release();
  const auto done = must(answer_of(next));
  EXPECT_EQ(done.epoch, 2u);
  for (std::size_t r = 0; r < w.size(); ++r) // the late request left marks
    accept_bytes(w.device_of(r), data.send[r]);
  EXPECT_TRUE(reduced(w, data, data.send));
  feed.until(world_phase::ready, 2);
}

// The connections that a sum needs are made first. Requests that need more connections wait for the
// rest: here until the communicator after the next, since the rest fails once.
TEST(WorldStall, SumsGoOnBeforeTheRestIsConnected) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.devices = 3, .faults = plan}};
  auto w = system.open_world(hasty());
  world_feed feed{system, w.actor()};
  auto data = prepare(w, {.type = dtype::float32, .op = reduce_op::sum}, count);
  auto sent = must(w.allocate<std::int32_t>(3, true));
  auto received = must(w.allocate<std::int32_t>(3));
  auto grouped = must(w.allocate<std::int32_t>(3, true));
  plan->add({fault::not_issued, verb::collective, 0});
  plan->add({fault::block, verb::build});
  plan->add({fault::fail, verb::connect, 1, 2});
  EXPECT_TRUE(has_code(answer_of(w.all_reduce(zeros(w))), errc::stalled));
  ASSERT_TRUE(plan->wait_injected(fault::block, 1, patience));
  auto summed = w.all_reduce(data.send);
  auto exchanged = w.all_to_all(sent, received);
  auto in_place = [](const auto& refs) {
    std::vector<any_gpu_ref> all{refs.begin(), refs.end()};
    return collective{.kind = collective_kind::all_reduce, .send = all, .recv = all};
  };
  auto in_group = w.run(group{.calls = {in_place(sent), in_place(grouped)}});
  plan->release();
  EXPECT_EQ(must(answer_of(summed)).epoch, 2u);
  EXPECT_TRUE(reduced(w, data, data.send));
  EXPECT_EQ(must(answer_of(exchanged)).epoch, 3u);
  EXPECT_EQ(must(answer_of(in_group)).epoch, 3u);
  EXPECT_EQ(plan->injected(fault::fail), 1u);
  feed.until(world_phase::ready, 3);
  EXPECT_TRUE(works(w));
}

// The error names the rank that waits behind a user's launch, with the states of all parts.
TEST(WorldStall, NamesTheRankThatIsBehind) {
  TROUPE_HOST_ONLY("its streams are held");
  test_system system{{.devices = 3}};
  auto w = system.open_world(hasty());
  auto refs = zeros(w);
  gate held;
  auto launched = held.hold_stream(w.device_of(2), {}, {refs[2]});
  ASSERT_TRUE(held.wait_reached());
  auto stalled = answer_of(w.all_reduce(refs));
  ASSERT_TRUE(has_code(stalled, errc::stalled));
  const auto f = *failure_of(error_of(stalled));
  EXPECT_EQ(f.rank, 2);
  EXPECT_EQ(f.device, 2);
  EXPECT_EQ(f.generation, 1u);
  ASSERT_EQ(f.parts.size(), 3u);
  EXPECT_EQ(f.parts[0], part_state::started);
  EXPECT_EQ(f.parts[1], part_state::started);
  EXPECT_EQ(f.parts[2], part_state::issued);
  held.open();
  EXPECT_TRUE(is_ok(answer_of(launched)));
  EXPECT_TRUE(works(w));
}

TEST(WorldStall, NamesTheRankThatWasNotIssued) {
  TROUPE_HOST_ONLY("its lane is held");
  test_system system{{.devices = 3}};
  auto w = system.open_world(hasty());
  auto refs = zeros(w);
  gate held;
  auto launched = held.hold_lane(w.device_of(0));
  ASSERT_TRUE(held.wait_reached());
  auto stalled = answer_of(w.all_reduce(refs));
  ASSERT_TRUE(has_code(stalled, errc::stalled));
  const auto f = *failure_of(error_of(stalled));
  EXPECT_EQ(f.rank, 0);
  ASSERT_EQ(f.parts.size(), 3u);
  EXPECT_EQ(f.parts[0], part_state::not_issued);
  held.open();
  EXPECT_TRUE(is_ok(answer_of(launched)));
  EXPECT_TRUE(works(w));
}

// The stall limit starts when the first rank has started. Time in a queue does not count.
TEST(WorldStall, DoesNotCountTheTimeInTheQueue) {
  TROUPE_HOST_ONLY("its streams are held");
  test_system system;
  auto w = system.open_world(hasty());
  auto refs = zeros(w);
  gate held;
  std::vector<pending<void>> all;
  for (std::size_t i = 0; i < w.size(); ++i)
    all.push_back(held.hold_stream(w.device_of(i), {}, {refs[i]}));
  auto sum = w.all_reduce(refs);
  EXPECT_FALSE(must(sum.wait_for(300ms)));
  held.open();
  EXPECT_TRUE(is_ok(answer_of(sum)));
  EXPECT_EQ(w.status().epoch, 1u);
}

TEST(WorldStall, SparesTheOtherWorld) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.devices = 3, .faults = plan}};
  auto broken = system.open_world(hasty());
  auto fine = system.open_world();
  auto refs = zeros(broken);
  auto data = prepare(fine, {.type = dtype::float32, .op = reduce_op::sum}, count);
  plan->add({fault::not_issued, verb::collective, 1});
  auto stalled = broken.all_reduce(refs);
  auto behind = fine.all_reduce(data.send); // on the same devices
  EXPECT_TRUE(is_ok(answer_of(behind)));
  EXPECT_TRUE(has_code(answer_of(stalled), errc::stalled));
  EXPECT_TRUE(reduced(fine, data, data.send));
  EXPECT_EQ(fine.status().epoch, 1u);
  EXPECT_TRUE(works(broken));
}

// An operation that hangs for its whole stall limit blocks no other world.
TEST(WorldStall, KeepsNoOtherWorldFromStarting) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.devices = 3, .faults = plan}};
  auto config = hasty();
  config.limits.stall_limit = patience;
  auto broken = system.open_world(config);
  auto fine = system.open_world(hasty());
  auto other = system.open_world({.devices = {2, 1}});
  plan->add({fault::not_issued, verb::collective, 1});
  auto stands = broken.all_reduce(zeros(broken));
  ASSERT_TRUE(plan->wait_injected(fault::not_issued, 1, patience));
  for (int i = 0; i < 50; ++i)
    for (auto* w : {&fine, &other}) {
      auto data = prepare(*w, {.type = dtype::int32, .op = reduce_op::sum}, 100);
      ASSERT_TRUE(is_ok(answer_of(w->all_reduce(data.send))));
      ASSERT_TRUE(reduced(*w, data, data.send));
    }
  EXPECT_FALSE(stands.ready());
  EXPECT_EQ(fine.status().epoch, 1u);
  EXPECT_EQ(other.status().epoch, 1u);
}

// The error names and ends the world whose operation hangs, even if operations of other worlds are
// behind it in its streams. There are fewer streams than worlds.
TEST(WorldStall, NamesTheRightOneOfManyWorlds) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.devices = 2, .faults = plan}};
  auto config = hasty();
  std::vector<world> worlds;
  for (int i = 0; i < 7; ++i)
    worlds.push_back(system.open_world(config));
  const auto data = [](const world& w) {
    return prepare(w, {.type = dtype::int32, .op = reduce_op::sum}, 100);
  };
  std::vector<collective_data> inputs;
  for (auto& w : worlds)
    inputs.push_back(data(w));
  for (std::size_t culprit = 0; culprit < 3; ++culprit) {
    const auto from = plan->injected(fault::not_issued);
    plan->add({fault::not_issued, verb::collective, 0});
    auto stands = worlds[culprit].all_reduce(zeros(worlds[culprit]));
    ASSERT_TRUE(plan->wait_injected(fault::not_issued, from + 1, patience));
    std::vector<pending<collective_done>> others;
    for (std::size_t i = 3; i < worlds.size(); ++i)
      for (int k = 0; k < 5; ++k)
        others.push_back(worlds[i].all_reduce(zeros(worlds[i])));
    auto why = answer_of(stands);
    ASSERT_TRUE(has_code(why, errc::stalled));
    EXPECT_EQ(failure_of(error_of(why))->operation, stands.number());
    for (auto& x : others)
      EXPECT_TRUE(is_ok(answer_of(x)));
  }
  for (std::size_t i = 3; i < worlds.size(); ++i) {
    EXPECT_EQ(worlds[i].status().epoch, 1u);
    ASSERT_TRUE(is_ok(answer_of(worlds[i].all_reduce(inputs[i].send))));
    EXPECT_TRUE(reduced(worlds[i], inputs[i], inputs[i].send));
  }
}

TEST(WorldStall, UsesUpTheRestarts) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.faults = plan}};
  auto config = hasty();
  config.limits.stall_limit = 20ms;
  config.limits.restarts = 2;
  auto w = system.open_world(config);
  world_feed feed{system, w.actor()};
  plan->add({fault::not_issued, verb::collective, 1, 1, forever});
  for (std::uint64_t i = 1; i <= 3; ++i) {
    feed.until(world_phase::ready, i);
    EXPECT_TRUE(has_code(answer_of(w.all_reduce(zeros(w))), errc::stalled));
  }
  const auto end = feed.until(world_phase::failed);
  ASSERT_TRUE(has_code(end.reason, errc::stalled));
  EXPECT_NE(describe(end.reason).find("2 restarts"), std::string::npos) << describe(end.reason);
  plan->disarm();
  EXPECT_TRUE(has_code(answer_of(w.all_reduce(zeros(w))), errc::unavailable));
  EXPECT_TRUE(works(w.device_of(0)));
  EXPECT_TRUE(works(system.open_world()));
}

TEST(WorldStall, ConnectThatHangs) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan =
      std::make_shared<fault_plan>(0, std::vector<fault_rule>{{fault::hang, verb::connect, 1}});
  test_system system{{.faults = plan}};
  auto config = hasty();
  config.limits.connect_limit = 500ms;
  auto w = system.try_open_world(config);
  ASSERT_TRUE(is_ok(w));
  EXPECT_EQ(w->status().epoch, 2u);
  EXPECT_TRUE(works(*w));
}

// -- errors of NCCL

class WorldErrors : public ::testing::TestWithParam<std::pair<int, std::uint64_t>> {};

INSTANTIATE_TEST_SUITE_P(RankAndCall, WorldErrors,
                         ::testing::Values(std::pair{0, 1}, std::pair{1, 1}, std::pair{2, 3},
                                           std::pair{any_device, 2}),
                         [](const auto& x) {
                           return x.param.first < 0 ? std::string{"all"}
                                                    : std::to_string(x.param.first);
                         });

// INV-7
TEST_P(WorldErrors, EndTheCommunicatorAndItGoesOn) {
  TROUPE_HOST_ONLY("a fault plan");
  const auto [device, call] = GetParam();
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.devices = 3, .faults = plan}};
  auto w = system.open_world();
  world_feed feed{system, w.actor()};
  plan->add({fault::fail, verb::collective, device, call});
  std::vector<std::vector<any_gpu_ref>> refs;
  std::vector<pending<collective_done>> all;
  for (int i = 0; i < 5; ++i) {
    refs.push_back(zeros(w));
    all.push_back(w.all_reduce(refs.back()));
  }
  int failed = 0;
  for (auto& x : all) {
    auto answer = answer_of(x);
    if (answer)
      continue;
    ++failed;
    ASSERT_TRUE(has_code(answer, errc::nccl_error));
    const auto f = *failure_of(error_of(answer));
    EXPECT_EQ(f.api, "collective");
    EXPECT_NE(f.rank, -1);
    EXPECT_NE(f.device, -1);
    EXPECT_GE(f.epoch, 1u);
    EXPECT_EQ(f.generation, 1u);
    EXPECT_NE(f.operation, 0u);
  }
  EXPECT_GE(failed, 1);
  plan->disarm();
  feed.until(world_phase::ready, 2);
  EXPECT_TRUE(works(w));
}

// An asynchronous error, which no call returns, is no success.
TEST(WorldErrors, AreSeenBehindTheCalls) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.devices = 3, .faults = plan}};
  auto w = system.open_world();
  world_feed feed{system, w.actor()};
  plan->add({fault::fail, verb::asynchronous_error, 1});
  auto answer = answer_of(w.all_reduce(zeros(w)));
  EXPECT_TRUE(has_code(answer, errc::nccl_error));
  feed.until(world_phase::ready, 2);
  EXPECT_TRUE(works(w));
}

// -- devices that change

TEST(WorldMembership, ChangesWithAReset) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system{{.devices = 3}};
  auto w = system.open_world();
  world_feed feed{system, w.actor()};
  auto refs = zeros(w);
  for (std::uint64_t i = 1; i <= 3; ++i) {
    const auto before = w.status();
    const auto rank = i % w.size();
    EXPECT_EQ(must(answer_of(w.device_of(rank).reset())), before.members[rank].generation + 1);
    const auto now = feed.until(world_phase::ready, before.epoch + 1);
    EXPECT_EQ(now.membership, before.membership + 1);
    for (std::size_t r = 0; r < w.size(); ++r)
      EXPECT_EQ(now.members[r].generation, before.members[r].generation + (r == rank ? 1 : 0));
    // The client's view is old. The error contains the new view.
    auto old = answer_of(w.all_reduce(refs, reduce_op::sum, {.membership = before.membership}));
    ASSERT_TRUE(has_code(old, errc::membership_changed));
    ASSERT_TRUE(status_of(error_of(old)));
    EXPECT_EQ(status_of(error_of(old))->members, now.members);
    EXPECT_TRUE(has_code(answer_of(w.all_reduce(refs)), errc::stale_ref));
    for (std::size_t r = 0; r < w.size(); ++r)
      if (r != rank) {
        EXPECT_TRUE(has_code(refs[r].access(), errc::skipped));
        accept_bytes(w.device_of(r), refs[r]);
      }
    // The client replaces the buffer of the rank that was reset, and continues.
    refs[rank] = must(answer_of(w.device_of(rank).allocate(dtype::float32, count, true)));
    const auto done =
        must(answer_of(w.all_reduce(refs, reduce_op::sum, {.membership = now.membership})));
    EXPECT_EQ(done.membership, now.membership);
    EXPECT_EQ(done.epoch, now.epoch);
    EXPECT_TRUE(works(w));
  }
}

TEST(WorldMembership, AResetAnswersWhatRunsAndWhatWaits) {
  TROUPE_HOST_ONLY("its streams are held");
  test_system system{{.devices = 3}};
  auto w = system.open_world();
  auto other = system.open_world({.devices = {0, 1}});
  world_feed feed{system, w.actor()};
  auto refs = zeros(w);
  gate held;
  auto launched = held.hold_stream(w.device_of(1), {}, {refs[1]});
  ASSERT_TRUE(held.wait_reached());
  std::vector<pending<collective_done>> all;
  for (int i = 0; i < 4; ++i)
    all.push_back(w.all_reduce(refs));
  auto reset = w.device_of(1).reset();
  EXPECT_TRUE(has_code(common_error(all), errc::device_reset));
  EXPECT_TRUE(has_code(answer_of(launched), errc::device_reset));
  EXPECT_TRUE(has_code(answer_of(w.all_reduce(refs)), errc::stale_ref));
  held.open();
  EXPECT_EQ(must(answer_of(reset)), 2u);
  feed.until(world_phase::ready, 2);
  EXPECT_TRUE(works(w));
  EXPECT_TRUE(works(other));
}

// The device is reset while the world is being built. The reset must not wait for a communicator
// that waits for the reset.
TEST(WorldMembership, AResetWhileTheWorldIsBuilt) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan = std::make_shared<fault_plan>(0, std::vector<fault_rule>{{fault::block, verb::build}});
  test_system system{{.faults = plan}};
  auto actor = system.spawn_world();
  world_feed feed{system, actor};
  ASSERT_TRUE(plan->wait_injected(fault::block, 1, patience));
  auto d = system.open(1);
  gate held; // so that the device is not ready before the communicator is built
  auto launched = held.hold_stream(d);
  ASSERT_TRUE(held.wait_reached());
  auto reset = d.reset();
  ASSERT_TRUE(is_ok(ask<world_status>(system, actor, get_status{})));
  plan->release();
  EXPECT_FALSE(must(reset.wait_for(50ms)));
  held.open();
  EXPECT_EQ(must(answer_of(reset)), 2u);
  const auto now = feed.until(world_phase::ready);
  EXPECT_EQ(now.members[1].generation, 2u);
  caf::anon_send_exit(actor, caf::exit_reason::user_shutdown);
}

TEST(WorldMembership, ResetsWithoutEnd) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system{{.devices = 3}};
  auto w = system.open_world();
  auto other = system.open_world();
  world_feed feed{system, w.actor()};
  world_feed other_feed{system, other.actor()};
  std::atomic<bool> stop = false;
  std::atomic<int> answers = 0;
  std::thread client{[&] {
    while (!stop) {
      auto refs = w.allocate(dtype::float32, count, true);
      if (!refs)
        continue;
      auto done = answer_of(w.all_reduce(*refs));
      EXPECT_TRUE(done || has_code(done, errc::device_reset) || has_code(done, errc::stale_ref));
      ++answers;
    }
  }};
  for (std::uint64_t i = 0; i < 12; ++i)
    EXPECT_TRUE(is_ok(answer_of(w.device_of(i % w.size()).reset())));
  stop = true;
  client.join();
  const auto settled = [&](const world_status& x) {
    return x.phase == world_phase::ready &&
           std::all_of(x.members.begin(), x.members.end(), [&](const world_member& m) {
             return m.generation == w.device_of(static_cast<std::size_t>(m.rank)).generation();
           });
  };
  feed.until(settled);
  other_feed.until(settled);
  EXPECT_TRUE(works(w));
  EXPECT_TRUE(works(other));
  EXPECT_GT(answers, 0);
}

TEST(WorldMembership, ADeviceThatEndsEndsTheWorld) {
  TROUPE_NEEDS_DEVICES(2);
  test_system system;
  auto w = system.open_world();
  world_feed feed{system, w.actor()};
  auto refs = zeros(w);
  w.device_of(1).shutdown();
  const auto end = feed.until(world_phase::failed);
  EXPECT_TRUE(has_code(end.reason, errc::unavailable));
  EXPECT_TRUE(has_code(answer_of(w.all_reduce(refs)), errc::unavailable));
  EXPECT_TRUE(works(w.device_of(0)));
}

// -- sticky faults

// INV-1, INV-7
TEST(WorldFault, AnswersEverythingAndEndsTheWorlds) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.devices = 3, .faults = plan}};
  auto w = system.open_world();
  auto other = system.open_world({.devices = {1, 2}});
  world_feed feed{system, w.actor()};
  world_feed other_feed{system, other.actor()};
  auto refs = zeros(w);
  auto others = zeros(other);
  gate held;
  auto launched = held.hold_stream(w.device_of(1), {}, {refs[1], others[0]});
  ASSERT_TRUE(held.wait_reached());
  std::vector<pending<collective_done>> all;
  for (int i = 0; i < 4; ++i)
    all.push_back(w.all_reduce(refs));
  auto elsewhere = other.all_reduce(others);
  caf::scoped_actor self{system.get()};
  auto told = detail::request(self, w.actor(), patience, sum_of(refs));
  ASSERT_TRUE(is_ok(ask<world_status>(system, w.actor(), get_status{})));
  for (std::size_t i = 0; i < w.size(); ++i) {
    auto stats = answer_of(w.device_of(i).stats());
    while (stats && stats->in_flight == 0)
      stats = answer_of(w.device_of(i).stats());
    ASSERT_TRUE(is_ok(stats));
  }
  plan->poison();
  const auto why = common_error(all);
  ASSERT_TRUE(has_code(why, errc::device_fault));
  EXPECT_EQ(failure_of(why)->native_name, "cudaErrorIllegalAddress");
  // Several devices were at work, so the origin of the fault is unknown.
  EXPECT_EQ(failure_of(why)->device, -1);
  EXPECT_NE(describe(why).find("unknown"), std::string::npos) << describe(why);
  EXPECT_TRUE(has_code(answer_of(launched), errc::device_fault));
  EXPECT_FALSE(answer_of(elsewhere));
  std::move(told).receive(
      [](const collective_done&) { ADD_FAILURE() << "it cannot be done"; },
      [](const caf::error& x) { EXPECT_TRUE(has_code(x, errc::device_fault)); });
  EXPECT_TRUE(has_code(feed.until(world_phase::failed).reason, errc::device_fault));
  EXPECT_TRUE(has_code(other_feed.until(world_phase::failed).reason, errc::device_fault));
  EXPECT_TRUE(has_code(answer_of(w.all_reduce(refs)), errc::unavailable));
  EXPECT_TRUE(has_code(answer_of(w.device_of(0).stats()), errc::unavailable));
  EXPECT_TRUE(refs[0].stale());
  EXPECT_TRUE(has_code(system.try_open_world(), errc::device_fault));
}

TEST(WorldFault, OriginIsTheOnlyDeviceAtWork) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.devices = 3, .faults = plan}};
  auto w = system.open_world();
  world_feed feed{system, w.actor()};
  if (collectives_of_run() == collectives_policy::direct) // a standby is made on all devices
    feed.until([](const world_status& x) { return x.standby_ready; });
  gate held;
  auto launched = held.hold_stream(w.device_of(2));
  ASSERT_TRUE(held.wait_reached());
  plan->poison();
  auto why = answer_of(launched);
  ASSERT_TRUE(has_code(why, errc::device_fault));
  EXPECT_EQ(failure_of(error_of(why))->device, 2);
  const auto end = feed.until(world_phase::failed);
  ASSERT_TRUE(has_code(end.reason, errc::device_fault));
  EXPECT_EQ(failure_of(end.reason)->device, 2);
}

TEST(WorldFault, PoisonedByItsOwnCall) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.devices = 3, .faults = plan}};
  auto w = system.open_world();
  world_feed feed{system, w.actor()};
  plan->add({fault::poison, verb::collective, 1});
  auto why = answer_of(w.all_reduce(zeros(w)));
  EXPECT_TRUE(has_code(why, errc::device_fault));
  EXPECT_TRUE(has_code(feed.until(world_phase::failed).reason, errc::device_fault));
}

// A lane that does not return from a call on a communicator that has ended.
TEST(WorldFault, ALaneThatIsStuckEndsEverything) {
  TROUPE_HOST_ONLY("a fault plan");
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.devices = 3, .faults = plan}};
  auto config = hasty();
  config.limits.quiet_limit = 50ms;
  auto w = system.open_world(config);
  world_feed feed{system, w.actor()};
  plan->add({fault::block, verb::collective, 1});
  auto refs = zeros(w);
  auto first = w.all_reduce(refs);
  EXPECT_TRUE(has_code(answer_of(first), errc::stalled));
  const auto end = feed.until(world_phase::failed);
  ASSERT_TRUE(has_code(end.reason, errc::lane_stuck));
  EXPECT_EQ(failure_of(end.reason)->device, 1);
  EXPECT_EQ(failure_of(end.reason)->rank, 1);
  EXPECT_TRUE(has_code(answer_of(w.all_reduce(refs)), errc::unavailable));
  plan->release();
}

// -- shutdown

TEST(WorldEnd, SystemEndsWithRequestsOnTheirWay) {
  std::vector<pending<collective_done>> all;
  for (int i = 0; i < 5; ++i) {
    test_system system{{.devices = 3}};
    auto w = system.open_world();
    auto refs = zeros(w);
    for (int k = 0; k < 20; ++k)
      all.push_back(w.all_reduce(refs));
  }
  for (auto& x : all) {
    auto answer = answer_of(x);
    EXPECT_TRUE(answer || has_code(answer, errc::unavailable));
  }
}

TEST(WorldEnd, SystemEndsWhileAWorldIsBuilt) {
  for (int i = 0; i < 5; ++i) {
    test_system system{{.devices = 3}};
    auto actor = system.spawn_world();
    caf::anon_send_exit(actor, caf::exit_reason::user_shutdown);
  }
}

// The device actors end with the last handle, and start again with the next one.
TEST(WorldEnd, MessagesAreAnsweredAfterTheLastHandleWentOnce) {
  test_system system;
  auto running = [&] { return system.get().registry().running(); };
  const auto before = running();
  for (int i = 0; i < 3; ++i) {
    {
      auto w = system.open_world();
      EXPECT_TRUE(is_ok(ask<collective_done>(system, w.actor(), barrier{})));
      auto d = must(system.open(0).actor());
      EXPECT_TRUE(is_ok(ask<device_stats>(system, d, stats{})));
    }
    ASSERT_TRUE(testing::eventually([&] { return running() <= before; }));
  }
}

TEST(WorldEnd, ResultsOutliveTheActorSystem) {
  std::optional<pending<collective_done>> done;
  std::vector<any_gpu_ref> refs;
  {
    test_system system;
    auto w = system.open_world();
    refs = zeros(w);
    done = w.all_reduce(refs);
    EXPECT_TRUE(is_ok(answer_of(*done)));
  }
  EXPECT_TRUE(done->ready());
  EXPECT_EQ(must(done->result()).epoch, 1u);
  done->cancel();
  for (auto& x : refs)
    EXPECT_TRUE(x.stale());
}

TEST(WorldLife, BuildsAgainAfterABuildThatHangs) {
  TROUPE_HOST_ONLY("a fault plan");
  const auto plan = std::make_shared<fault_plan>();
  plan->add({.kind = fault::block, .on = verb::build, .first = 2});
  test_system system{{.devices = 2, .faults = plan}};
  for (auto ordinal : system.ordinals()) // a worker may need longer to start
    EXPECT_TRUE(works(system.open(ordinal)));
  auto under_test = system.open_world({.limits = {.build_deadline = 500ms}});
  auto refs = must(under_test.allocate<float>(16, true));
  plan->add({.kind = fault::fail, .on = verb::collective, .device = 0});
  EXPECT_TRUE(has_code(answer_of(under_test.all_reduce(refs)), errc::nccl_error));
  for (std::size_t i = 0; i < 2; ++i)
    must(answer_of(under_test.device_of(i).fill(refs[i], 0.f)));
  EXPECT_TRUE(is_ok(answer_of(under_test.all_reduce(refs)))); // on the third communicator
  plan->release();
}

TEST(WorldLife, DoesNotFailForThoseWhoWait) {
  TROUPE_HOST_ONLY("a fault plan");
  const auto plan = std::make_shared<fault_plan>();
  plan->add({.kind = fault::slow, .on = verb::build, .first = 2, .delay = 100ms});
  test_system system{{.devices = 2, .faults = plan, .lanes = {.queue_limit = 64}}};
  auto under_test = system.open_world({});
  auto refs = must(under_test.allocate<float>(16, true));
  plan->add({.kind = fault::fail, .on = verb::collective, .device = 0});
  EXPECT_TRUE(has_code(answer_of(under_test.all_reduce(refs)), errc::nccl_error));
  for (std::size_t i = 0; i < 2; ++i)
    must(answer_of(under_test.device_of(i).fill(refs[i], 0.f)));
  std::vector<pending<collective_done>> all;
  for (int i = 0; i < 70; ++i)
    all.push_back(under_test.all_reduce(refs));
  std::size_t done = 0;
  for (auto& x : all) {
    auto answer = answer_of(x);
    EXPECT_TRUE(answer || has_code(answer, errc::overloaded));
    done += answer ? 1 : 0;
  }
  EXPECT_GE(done, 32u);
  EXPECT_EQ(under_test.status().phase, world_phase::ready);
}

} // namespace
} // namespace troupe::testing
