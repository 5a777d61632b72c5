/// The runtime: its lanes, its end, and faults that end all operations.
#include "operation/admission_lock.hpp"
#include "runtime/retry_queue.hpp"
#include "runtime/runtime.hpp"
#include "support/core_fixture.hpp"
#include "support/forwarding_backend.hpp"
#include "support/no_threads.hpp"
#include <troupe/launch.hpp>
#include <troupe/log.hpp>

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <future>
#include <latch>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace troupe {

namespace {

bool becomes_idle(detail::background& x, std::chrono::nanoseconds time) {
  detail::fair_limit limit{time};
  return x.wait_idle(limit);
}

using testing::allocate_bytes;
using testing::answer_of;
using testing::core_system;
using testing::eventually;
using testing::fault;
using testing::fault_plan;
using testing::gate;
using testing::has_code;
using testing::is_ok;
using testing::must;
using testing::no_work;
using testing::probe;
using testing::verb;
using namespace std::chrono_literals;

TEST(Background, DoesWhatItHasNoThreadFor) {
  detail::background jobs;
  std::atomic<int> done{0};
  {
    const testing::no_threads held;
    for (int i = 0; i < 3; ++i)
      jobs.run([&] { ++done; });
    EXPECT_TRUE(becomes_idle(jobs, 20s));
    EXPECT_EQ(done, 3);
  }
  jobs.run([&] { ++done; });
  EXPECT_TRUE(becomes_idle(jobs, 20s));
  EXPECT_EQ(done, 4);
}

TEST(Runtime, HasALanePerDevice) {
  core_system system{{.devices = 3}};
  const auto& runtime = system.runtime();
  EXPECT_EQ(runtime->device_count(), 3);
  const auto first = must(runtime->lane_of(1));
  EXPECT_EQ(must(runtime->lane_of(1)), first);
  EXPECT_NE(must(runtime->lane_of(2)), first);
  EXPECT_EQ(first->state().ordinal(), 1);
  EXPECT_TRUE(has_code(runtime->lane_of(-1), errc::invalid_argument));
  EXPECT_TRUE(has_code(runtime->lane_of(3), errc::invalid_argument));
}

TEST(Runtime, MakesOneLaneForManyWhoAsk) {
  core_system system;
  std::latch start{4};
  std::array<std::shared_ptr<detail::lane>, 4> lanes;
  std::vector<std::thread> threads;
  for (auto& x : lanes)
    threads.emplace_back([&] {
      start.arrive_and_wait();
      x = system.lane();
    });
  for (auto& x : threads)
    x.join();
  for (auto& x : lanes)
    EXPECT_EQ(x, lanes[0]);
}

TEST(Runtime, LetsTheNextOneHaveTheDevices) {
  const auto backend = make_host_backend({.devices = 1});
  for (int i = 0; i < 20; ++i) {
    core_system system{{.backend = backend}};
    const auto device = system.device();
    must(answer_of(device.launch(no_work(), {}, {}, {})));
    EXPECT_TRUE(has_code(backend->open(0), errc::unavailable));
  }
  EXPECT_TRUE(backend->open(0));
}

TEST(Runtime, AnswersEverythingWhenItCloses) {
  core_system system{{.devices = 2, .lanes = {.in_flight_limit = 1}}};
  std::array<gate, 2> gates;
  std::vector<std::shared_ptr<detail::completion>> all;
  for (int i = 0; i < 2; ++i) {
    const auto device = system.device(i);
    auto& held = gates[static_cast<std::size_t>(i)];
    all.push_back(device.launch(held.in_stream(), {}, {}, {}));
    held.wait_reached();
    for (int n = 0; n < 10; ++n)
      all.push_back(device.launch(no_work(), {}, {}, {}));
  }
  auto both = std::make_shared<probe>(std::vector{system.lane(0), system.lane(1)});
  system.runtime()->start(both);
  all.push_back(both);
  auto reset = system.device(0).reset({});
  std::thread opener{[&] {
    for (auto& x : all)
      EXPECT_TRUE(has_code(answer_of(x), errc::unavailable));
    EXPECT_TRUE(has_code(answer_of(reset), errc::unavailable));
    for (auto& x : gates)
      x.open();
  }};
  system.runtime()->close();
  opener.join();
  EXPECT_EQ(system.deadlines().size(), 0u);
  EXPECT_EQ(both->issued(), 0);
}

TEST(Runtime, RefusesEverythingOnceClosed) {
  core_system system{{.devices = 2}};
  const auto device = system.device(0);
  must(answer_of(device.launch(no_work(), {}, {}, {})));
  system.runtime()->close();
  system.runtime()->close();
  EXPECT_TRUE(has_code(answer_of(device.launch(no_work(), {}, {}, {})), errc::unavailable));
  EXPECT_TRUE(has_code(answer_of(device.reset({})), errc::unavailable));
  EXPECT_TRUE(has_code(system.runtime()->lane_of(1), errc::unavailable)); // none starts now
}

// Includes a runtime whose last reference is dropped by a completion.
TEST(Runtime, MayEndOnAnyThread) {
  for (int i = 0; i < 200; ++i) {
    auto op = [] {
      core_system system;
      auto x = std::make_shared<probe>(std::vector{system.lane()});
      x->deadline = detail::clock::now() + 1ms;
      x->on_answer([keep = system.runtime()] {});
      system.runtime()->start(x);
      return x;
    }();
    EXPECT_TRUE(op->completed());
  }
}

// INV-7
TEST(Runtime, EndsEverythingForOneCause) {
  core_system system{{.devices = 3}};
  std::vector<std::shared_ptr<detail::completion>> all;
  std::vector<std::unique_ptr<gate>> gates;
  for (int i = 0; i < 3; ++i) {
    const auto device = system.device(i);
    gates.push_back(std::make_unique<gate>());
    auto memory = allocate_bytes(device, 64);
    all.push_back(device.launch(gates.back()->in_stream(), {}, {memory}, {}));
    all.push_back(device.launch(no_work(), {memory}, {memory}, {}));
    gates.back()->wait_reached();
  }
  const auto why = make_error(errc::lane_stuck, "on purpose");
  static_cast<void>(system.runtime()->end_everything(why));
  static_cast<void>(system.runtime()->end_everything(make_error(errc::device_fault, "later")));
  EXPECT_TRUE(system.runtime()->ended());
  for (auto& x : all)
    EXPECT_EQ(answer_of(x), why);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(system.device(i).state().phase(), device_phase::failed);
    EXPECT_EQ(system.device(i).state().reason(), why);
    EXPECT_TRUE(
        has_code(answer_of(system.device(i).launch(no_work(), {}, {}, {})), errc::unavailable));
  }
  for (auto& x : gates)
    x->open();
}

/// Counts how often pinned memory is freed. From then on, no work of the device is held.
class pinned_device final : public testing::forwarding_device {
public:
  struct state {
    std::atomic<int> freed{0};
    gate held;
  };

  pinned_device(std::unique_ptr<backend_device> inner, state& x)
      : forwarding_device(std::move(inner)), state_(x) {}
  caf::error deallocate_pinned(void* memory) noexcept override {
    ++state_.freed;
    state_.held.open();
    return inner_->deallocate_pinned(memory);
  }
  std::function<caf::error(void*)> pinned_deleter() noexcept override { return nullptr; }

private:
  state& state_;
};

class pinned_backend final : public testing::forwarding_backend {
public:
  pinned_backend() : forwarding_backend(make_host_backend({.devices = 1})) {}
  caf::expected<std::unique_ptr<backend_device>> open(int ordinal) noexcept override {
    return open_as<pinned_device>(ordinal, state);
  }

  pinned_device::state state;
};

/// A launch whose work calls `held_before_verdict` and gives a verdict.
constexpr const char* late_verdict = "troupe.testing.runtime.late_verdict";
std::function<void()> held_before_verdict;

[[maybe_unused]] const bool registered = [] {
  must(register_launch(late_verdict,
                       library_launch{.enqueue =
                                          [](launch_context& context, auto&&...) {
                                            return context.run_on_host([pass = held_before_verdict,
                                                                        word = context.verdict()] {
                                              pass();
                                              *word = 1;
                                            });
                                          },
                                      .judge = [](std::int32_t) { return caf::error{}; }}));
  return true;
}();

/// Work of a virtual device goes on after the device was given up.
TEST(Runtime, KeepsTheVerdictsOfWorkThatItGivesUp) {
  const auto backend = std::make_shared<pinned_backend>();
  auto& held = backend->state.held;
  held_before_verdict = held.passer();
  {
    core_system system{{.backend = backend}};
    const auto op = system.device().launch(late_verdict, {}, {}, {}, {});
    held.wait_reached();
    const auto why = make_error(errc::lane_stuck, "on purpose");
    static_cast<void>(system.runtime()->end_everything(why));
    EXPECT_EQ(answer_of(op), why);
    EXPECT_TRUE(testing::settles(*op));
  }
  EXPECT_EQ(backend->state.freed, 0);
  held.open();
}

TEST(Runtime, NamesTheOriginOfAFaultOnlyWhenItIsKnown) {
  for (int busy = 1; busy <= 2; ++busy) {
    const auto plan = std::make_shared<fault_plan>();
    core_system system{{.devices = 3, .plan = plan}};
    std::vector<std::unique_ptr<gate>> gates;
    std::vector<std::shared_ptr<detail::completion>> all;
    for (int i = 0; i < 3; ++i)
      must(answer_of(system.device(i).launch(no_work(), {}, {}, {})));
    for (int i = 0; i < busy; ++i) {
      gates.push_back(std::make_unique<gate>());
      all.push_back(system.device(i).launch(gates.back()->in_stream(), {}, {}, {}));
      gates.back()->wait_reached();
    }
    plan->poison();
    for (auto& x : all) {
      const auto told = failure_of(answer_of(x)).value();
      EXPECT_EQ(told.code, errc::device_fault);
      EXPECT_EQ(told.device, busy == 1 ? 0 : -1);
      EXPECT_EQ(told.native_code, 700);
    }
    for (auto& x : gates)
      x->open();
  }
}

TEST(Runtime, EndsAsAFaultWhenAnEndCannotBeSeen) {
  const auto plan = std::make_shared<fault_plan>();
  core_system system{{.plan = plan}};
  const auto device = system.device();
  gate held; // it uses the only event
  auto first = device.launch(held.in_stream(), {}, {}, {});
  held.wait_reached();
  plan->add({.on = verb::create_event, .times = testing::forever, .error = errc::cuda_error});
  auto second = device.launch(no_work(), {}, {}, {});
  EXPECT_TRUE(answer_of(second));
  EXPECT_TRUE(answer_of(first));
  EXPECT_TRUE(eventually([&] { return device.state().phase() == device_phase::failed; }));
  EXPECT_TRUE(has_code(device.state().reason(), errc::device_fault)); // scope: the process
  held.open();
}

/// A lane that was given up stays for ever. In a process of its own this is no leak.
[[noreturn]] void give_up_a_lane() {
  const auto plan = std::make_shared<fault_plan>(
      0, std::vector<testing::fault_rule>{{.kind = fault::block, .on = verb::fill}});
  {
    core_system system{{.plan = plan}};
    const auto device = system.device();
    auto memory = allocate_bytes(device, 64);
    auto stuck = device.fill(memory, std::uint8_t{0}, {.deadline = 50ms});
    EXPECT_TRUE(has_code(answer_of(stuck), errc::deadline_exceeded));
    const auto begin = detail::clock::now();
    system.runtime()->close();
    EXPECT_LT(detail::clock::now() - begin, 10s);
    plan->release(); // the lane returns, and all its state still exists
    EXPECT_TRUE(testing::settles(*stuck));
  }
  std::_Exit(::testing::Test::HasFailure() ? 1 : 0);
}

TEST(Runtime, GivesUpALaneThatIsStuck) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(give_up_a_lane(), ::testing::ExitedWithCode(0), "");
}

/// An operation of a lost process, which never settles. Calls `on_over` when its part is over.
class lost_operation final : public probe {
public:
  lost_operation(const std::shared_ptr<detail::lane>& on, std::function<void()> on_over)
      : probe({on, on}), on_over_(std::move(on_over)) {}

  void on_part_over(detail::part&) noexcept override { on_over_(); }
  detail::lost_process process(std::uint64_t until, std::function<bool()> is_over) {
    return {until, std::move(is_over), {&parts()[0]}};
  }

private:
  const std::function<void()> on_over_;
};

bool has_lost_work(detail::lane& x) {
  const detail::admission_lock lock;
  return x.state().has_lost_work(lock);
}

void note_loss(detail::lane& x, std::uint64_t until) {
  const detail::admission_lock lock;
  x.state().set_lost_until(lock, until);
}

// INV-8: work counts as over only after that of processes that were lost earlier.
TEST(Runtime, EndsLostProcessesInTheirOrder) {
  core_system system;
  const auto lane = system.lane();
  const auto lose = [&](lost_operation& op, std::uint64_t until, std::function<bool()> is_over) {
    note_loss(*lane, until);
    system.runtime()->on_lost_process(*lane, op.process(until, std::move(is_over)), {});
  };
  std::atomic<bool> is_over{false};
  std::atomic<bool> second_is_over{false};
  gate ending;
  lost_operation first{lane, ending.passer()};
  lost_operation second{lane, [&] { second_is_over = true; }};
  lose(first, 1, [&] { return is_over.load(); });
  is_over = true;
  ending.wait_reached();
  lose(second, 2, [] { return true; });
  EXPECT_FALSE(second_is_over);
  EXPECT_TRUE(has_lost_work(*lane));
  ending.open();
  EXPECT_TRUE(eventually([&] { return !has_lost_work(*lane); }));
  EXPECT_TRUE(second_is_over);
}

/// A process that was lost while the device was opened had no work. Another one has it by now.
TEST(Runtime, EndsALossWithoutWork) {
  core_system system;
  const auto lane = system.lane();
  note_loss(*lane, 1);
  lane->request_revival();
  EXPECT_TRUE(eventually([&] { return !has_lost_work(*lane); }));
}

/// The lane ends before it has taken notice of the loss.
TEST(Runtime, EndsALossWithItsLane) {
  core_system system;
  const auto lane = system.lane();
  note_loss(*lane, 1);
  system.runtime()->shut_down(0, make_error(errc::unavailable, "the test ends it"));
  EXPECT_TRUE(eventually([&] { return !has_lost_work(*lane); }));
}

/// Nothing waits any more for work of a lost process when the runtime closes.
TEST(Runtime, EndsLostProcessesWhenItCloses) {
  core_system system;
  std::atomic<bool> part_is_over{false};
  lost_operation op{system.lane(), [&] { part_is_over = true; }};
  system.runtime()->on_lost_process(*system.lane(), op.process(1, [] { return false; }), {});
  EXPECT_FALSE(part_is_over);
  system.runtime()->close();
  EXPECT_TRUE(part_is_over);
}

/// A request whose attempts are refused when they are made.
class refused_request final : public detail::retryable {
public:
  std::uint64_t key() const noexcept override { return 0; }
  std::shared_ptr<detail::operation> next_attempt() override {
    return detail::refused_operation<detail::nothing>("probe", make_error(errc::stale_ref, "gone"));
  }
  void on_admitted(const std::shared_ptr<detail::operation>&) override {}
  void on_refused(const caf::error& why) override { EXPECT_TRUE(has_code(why, errc::stale_ref)); }
};

/// To the admission, no request has failed. So the queue waits for the rest of those that have.
TEST(RetryQueue, HasPatienceOfItsOwnInEachRound) {
  core_system system;
  detail::retry_queue queue{system.runtime()->admissions()};
  const auto begin = detail::clock::now();
  queue.add(std::make_shared<refused_request>());
  EXPECT_FALSE(queue.make_again());
  EXPECT_TRUE(queue.make_again()); // the queue is empty
  EXPECT_TRUE(eventually([&] { return detail::clock::now() > begin + 30ms; }));
  queue.add(std::make_shared<refused_request>());
  EXPECT_FALSE(queue.make_again());
}

TEST(Background, RunsJobsBesideEachOther) {
  detail::background workers;
  std::latch together{3};
  std::atomic<int> done{0};
  for (int i = 0; i < 3; ++i)
    workers.run([&] {
      together.arrive_and_wait();
      done.fetch_add(1);
    });
  EXPECT_TRUE(becomes_idle(workers, testing::patience));
  EXPECT_EQ(done, 3);
  gate held;
  workers.run(held.passer());
  EXPECT_FALSE(becomes_idle(workers, 10ms));
  held.open();
  EXPECT_TRUE(becomes_idle(workers, testing::patience));
}

} // namespace

} // namespace troupe
