// The end of the process after its devices are lost: by `exit_process`, and by a return from main.
// Each scenario runs in a child process.

#include "support/child_process.hpp"
#include "support/very_end.hpp"
#include "support/world_fixture.hpp"

#include <caf/all.hpp>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <unistd.h>

namespace troupe::testing {
namespace {

constexpr std::chrono::nanoseconds bound = 2s;
constexpr int exit_status = 43;
constexpr int return_status = 7;

// -- in the child

/// Reports when static objects are destroyed.
struct static_object {
  ~static_object() {
    if (told)
      tell("static_objects_ended");
  }
  bool told = false;
};

void tell_of_exit_handlers() {
  static static_object object;
  object.told = true;
  if (std::atexit([] { tell("exit_handlers_ran"); }) != 0)
    throw std::runtime_error("no exit handler");
}

[[noreturn]] void leave() {
  tell_time("left");
  exit_process(exit_status, "the devices are lost");
}

/// Waits while another thread ends the process.
[[noreturn]] void wait_for_the_end() {
  flag never;
  never.wait();
  std::fprintf(stderr, "the process was not ended\n");
  std::_Exit(1);
}

/// Runs one function in CAF's pool.
class once_actor final : public caf::event_based_actor {
public:
  once_actor(caf::actor_config& cfg, std::function<void()> what)
      : caf::event_based_actor(cfg), what_(std::move(what)) {}
  caf::behavior make_behavior() override {
    what_();
    return {};
  }

private:
  std::function<void()> what_;
};

TROUPE_CHILD(EndsFromMain) {
  tell_of_exit_handlers();
  std::printf("a line that is not flushed"); // NOLINT(*-err33-c)
  leave();
}

TROUPE_CHILD(EndsFromAnActor) {
  tell_of_exit_handlers();
  test_system system;
  auto w = system.open_world();
  system.get().spawn<once_actor>(leave);
  wait_for_the_end();
}

TROUPE_CHILD(EndsFromACallback) {
  tell_of_exit_handlers();
  test_system system;
  auto w = system.open_world();
  w.barrier().then([](const caf::expected<collective_done>&) { leave(); });
  wait_for_the_end();
}

TROUPE_CHILD(EndsFromALane) {
  tell_of_exit_handlers();
  test_system system;
  auto w = system.open_world();
  auto launched = w.device_of(0).launch([](launch_context&) -> caf::error { leave(); }, {}, {});
  wait_for_the_end();
}

TROUPE_CHILD(EndsFromManyThreads) {
  tell_of_exit_handlers();
  gate together;
  std::atomic<int> ready = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i)
    threads.emplace_back([&ready, i] {
      ++ready;
      while (ready < 8)
        std::this_thread::yield();
      exit_process(100 + i, "thread " + std::to_string(i));
    });
  for (auto& x : threads)
    x.join(); // never returns
  return 1;
}

TROUPE_CHILD(EndsWhileStdoutIsHeld) {
  flag held;
  std::thread{[&held] {
    ::flockfile(stdout);
    held.set();
    flag never;
    never.wait();
  }}.detach();
  held.wait();
  leave();
}

/// A program that loses its devices while requests are pending.
struct lost_program {
  std::shared_ptr<fault_plan> plan = std::make_shared<fault_plan>();
  /// Injects faults below `plan`. A fault of `plan` does not release calls that block here.
  std::shared_ptr<fault_plan> below = std::make_shared<fault_plan>();
  test_system system;
  world w;
  world_feed feed;
  std::vector<any_gpu_ref> refs;
  std::vector<pending<collective_done>> sums;
  host_buffer pinned;

  explicit lost_program(world_limits limits = {}, flight_record_options record = {})
      : system({.devices = 3,
                .faults = plan,
                .wrap = [this](auto inner) { return with_faults(std::move(inner), below); },
                .flight_record = std::move(record)}),
        w(system.open_world({.limits = limits})), feed(system, w.actor()),
        refs(must(w.allocate(dtype::float32, 1000, true))),
        pinned(must(w.device_of(0).allocate_pinned(1000))) {
    set_log_sink([](const log_line&) {});
  }

  /// Limits for `stick`.
  static world_limits hasty() {
    world_limits result;
    result.stall_limit = 50ms;
    result.quiet_limit = 50ms;
    return result;
  }

  void sum(int times) {
    for (int i = 0; i < times; ++i)
      sums.push_back(w.all_reduce(refs));
  }

  /// Injects a fault while a stream is blocked.
  void fault() {
    gate held;
    auto launched = held.hold_stream(w.device_of(1), {}, {refs[1]});
    must(held.wait_reached() ? caf::error{} : make_error(errc::internal, "nothing stands still"));
    sum(100);
    plan->poison();
    for (auto& x : sums)
      if (auto why = answer_of(x); !has_code(why, errc::device_fault))
        throw std::runtime_error("a request after a fault: " + describe(error_of(why)));
    expect_failed(errc::device_fault);
  }

  /// Blocks a lane in a call on a communicator that has ended.
  void stick() {
    plan->add({fault::block, verb::collective, 1});
    sum(1);
    if (auto why = answer_of(sums.back()); !has_code(why, errc::stalled))
      throw std::runtime_error("a request that stands still: " + describe(error_of(why)));
    expect_failed(errc::lane_stuck);
  }

  void expect_failed(errc why) {
    const auto end = feed.until(world_phase::failed);
    if (!has_code(end.reason, why))
      throw std::runtime_error("the world failed: " + describe(end.reason));
    for (auto& x : refs)
      if (!x.stale())
        throw std::runtime_error("a handle is not stale");
    tell("failed");
  }
};

TROUPE_CHILD(EndsAfterAFault) {
  tell_of_exit_handlers();
  lost_program program;
  program.fault();
  leave();
}

TROUPE_CHILD(EndsFromTheFirstErrorOfAFault) {
  lost_program program;
  gate held;
  auto launched = held.hold_stream(program.w.device_of(1), {}, {program.refs[1]});
  held.wait_reached();
  for (int i = 0; i < 100; ++i)
    program.w.all_reduce(program.refs).then([](const caf::expected<collective_done>& x) {
      if (!x)
        leave();
    });
  program.plan->poison();
  wait_for_the_end();
}

TROUPE_CHILD(EndsWhileALaneIsStuck) {
  tell_of_exit_handlers();
  lost_program program{lost_program::hasty()};
  program.stick();
  leave();
}

/// The library has not noticed the stuck lane yet.
TROUPE_CHILD(EndsWhileALaneIsInTheUsersCall) {
  lost_program program;
  gate held;
  auto launched = held.hold_lane(program.w.device_of(1));
  held.wait_reached();
  program.sum(10);
  leave();
}

std::string record_path() { return std::getenv("TROUPE_TEST_RECORD"); }

TROUPE_CHILD(EndsWithItsFlightRecord) {
  lost_program program{{}, {.path = record_path()}};
  program.fault();
  leave();
}

// -- a return from main

int leave_by_return() {
  tell_time("left");
  return return_status;
}

TROUPE_CHILD(ReturnsUnharmed) {
  lost_program program;
  return leave_by_return();
}

TROUPE_CHILD(ReturnsAfterAFault) {
  tell_of_exit_handlers();
  lost_program program;
  program.fault();
  return leave_by_return();
}

/// Handles and results may live as long as static objects.
TROUPE_CHILD(ReturnsAfterAFaultWithStaticHandles) {
  static std::optional<any_gpu_ref> ref;
  static std::optional<host_buffer> pinned;
  static std::optional<pending<collective_done>> sum;
  lost_program program;
  ref = program.refs[0];
  pinned = program.pinned;
  program.fault();
  sum = program.sums[0];
  return leave_by_return();
}

TROUPE_CHILD(ReturnsWhileALaneIsStuck) {
  tell_of_exit_handlers();
  lost_program program{lost_program::hasty()};
  program.stick();
  return leave_by_return();
}

/// The fault comes while a lane is blocked in a call and cannot notice it.
TROUPE_CHILD(ReturnsAfterAFaultWhileALaneIsStuck) {
  tell_of_exit_handlers();
  lost_program program;
  program.below->add({fault::block, verb::collective, 1});
  program.sum(10);
  if (!program.below->wait_injected(fault::block, 1, patience))
    throw std::runtime_error("no lane is stuck");
  program.plan->poison();
  for (auto& x : program.sums)
    if (auto why = answer_of(x); !has_code(why, errc::device_fault))
      throw std::runtime_error("a request after a fault: " + describe(error_of(why)));
  program.expect_failed(errc::device_fault);
  return leave_by_return();
}

/// The fault comes while a communicator is being built, and its builder does not return.
TROUPE_CHILD(ReturnsAfterAFaultWhileABuilderIsStuck) {
  lost_program program;
  program.below->add({fault::block, verb::build});
  caf::error why;
  std::thread opens{[&] { why = error_of(program.system.try_open_world()); }};
  if (!program.below->wait_injected(fault::block, 1, patience))
    throw std::runtime_error("nothing is built");
  program.fault();
  opens.join();
  return has_code(why, errc::device_fault) ? leave_by_return() : 1;
}

/// The program does not wait for its requests.
TROUPE_CHILD(ReturnsInTheMiddleOfAFault) {
  lost_program program;
  gate held;
  auto launched = held.hold_stream(program.w.device_of(1), {}, {program.refs[1]});
  held.wait_reached();
  program.sum(100);
  program.plan->poison();
  return leave_by_return();
}

// -- after the destruction of static objects

/// Makes the library write a log line.
void log_a_line(const device& gpu, const char* text) {
  auto filled = gpu.fill(must(gpu.allocate<std::uint32_t>(100)), 1u);
  filled.then([text](const caf::expected<void>&) { throw std::runtime_error(text); });
  flag called;
  filled.then([&](const caf::expected<void>&) { called.set(); });
  if (!called.wait())
    throw std::runtime_error("a callback was not called");
}

/// The actor system is never destroyed, and is used until the process ends.
TROUPE_CHILD(GoesOnAfterStaticObjectsAreGone) {
  auto* system = new test_system{{.devices = 1}};
  auto* gpu = new device{system->open()};
  log_a_line(*gpu, "before the end");
  at_the_very_end([gpu] {
    log_a_line(*gpu, "at the end");
    must(answer_of(launch_nothing(*gpu)));
    if (in_workers()) {
      tell("lost", describe(error_of(answer_of(launch_death(*gpu)))));
      must(answer_of(gpu->stats())); // the device is ready again
    }
    tell("over");
  });
  return leave_by_return();
}

// -- in the parent

/// Returns how long a child takes that only starts and returns: the overhead of a slow machine.
std::chrono::nanoseconds control() {
  const auto end = run_child("ReturnsUnharmed", patience);
  EXPECT_EQ(end.status, return_status) << to_string(end);
  return end.over - end.begun;
}

std::string scenario_of(const ::testing::TestParamInfo<const char*>& x) { return x.param; }

class ProcessExit : public ::testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(Everywhere, ProcessExit,
                         ::testing::Values("EndsFromMain", "EndsFromAnActor", "EndsFromACallback",
                                           "EndsFromALane", "EndsWhileStdoutIsHeld",
                                           "EndsAfterAFault", "EndsFromTheFirstErrorOfAFault",
                                           "EndsWhileALaneIsStuck",
                                           "EndsWhileALaneIsInTheUsersCall"),
                         scenario_of);

TEST_P(ProcessExit, EndsAtOnceWithStatusAndMessage) {
  TROUPE_NEEDS_DEVICES(2);
#ifdef __SANITIZE_THREAD__
  if (std::string_view{GetParam()} == "EndsWhileStdoutIsHeld")
    GTEST_SKIP() << "the sanitizer flushes stdout at the end of a process";
#endif
  if (std::string_view{GetParam()} == "EndsFromALane")
    TROUPE_IN_PROCESS_ONLY("callables");
  const auto extra = control();
  const auto end = run_child(GetParam(), patience);
  EXPECT_TRUE(end.in_time);
  EXPECT_EQ(end.status, exit_status) << to_string(end);
  EXPECT_NE(end.err.find("the devices are lost\n"), std::string::npos) << to_string(end);
  EXPECT_LT(end.since("left"), bound + extra) << to_string(end);
  EXPECT_FALSE(end.was_told("static_objects_ended"));
  EXPECT_FALSE(end.was_told("exit_handlers_ran"));
}

TEST(ProcessExitOutput, HasWhatWasPrinted) {
  const auto end = run_child("EndsFromMain", patience);
  EXPECT_EQ(end.out, "a line that is not flushed");
  EXPECT_EQ(end.err, "the devices are lost\n");
}

TEST(ProcessExitOutput, HasTheFlightRecord) {
  TROUPE_NEEDS_DEVICES(2);
  const auto path = std::filesystem::temp_directory_path() /
                    ("troupe-exit-" + std::to_string(::getpid()) + ".json");
  const auto end =
      run_child("EndsWithItsFlightRecord", patience, {"TROUPE_TEST_RECORD=" + path.string()});
  EXPECT_EQ(end.status, exit_status) << to_string(end);
  std::ifstream file{path};
  const std::string text{std::istreambuf_iterator<char>{file}, {}};
  EXPECT_NE(text.find("device_fault"), std::string::npos) << text.size() << " bytes";
  std::filesystem::remove(path);
}

TEST(ProcessExitOfMany, IsDecidedByOne) {
  for (int i = 0; i < 10; ++i) {
    const auto end = run_child("EndsFromManyThreads", patience);
    ASSERT_GE(end.status, 100) << to_string(end);
    EXPECT_EQ(end.err, "thread " + std::to_string(end.status - 100) + "\n");
    EXPECT_FALSE(end.was_told("exit_handlers_ran"));
  }
}

class ProcessReturn : public ::testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(
    Everywhere, ProcessReturn,
    ::testing::Values("ReturnsAfterAFault", "ReturnsAfterAFaultWithStaticHandles",
                      "ReturnsWhileALaneIsStuck", "ReturnsAfterAFaultWhileALaneIsStuck",
                      "ReturnsAfterAFaultWhileABuilderIsStuck", "ReturnsInTheMiddleOfAFault"),
    scenario_of);

TEST_P(ProcessReturn, ReturnsInTime) {
  TROUPE_NEEDS_DEVICES(2);
  const auto extra = control();
  const auto end = run_child(GetParam(), patience);
  EXPECT_TRUE(end.in_time);
  EXPECT_EQ(end.status, return_status) << to_string(end);
  EXPECT_LT(end.since("left"), bound + extra) << to_string(end);
}

TEST(ProcessReturnWithDevices, LogsAndCallsUntilTheEnd) {
  TROUPE_HOST_ONLY("CUDA ends before");
  // MALLOC_PERTURB_ overwrites freed memory, so that its later use is detected.
  const auto end = run_child("GoesOnAfterStaticObjectsAreGone", patience, {"MALLOC_PERTURB_=165"});
  EXPECT_EQ(end.status, return_status) << to_string(end);
  EXPECT_TRUE(end.was_told("over")) << to_string(end);
  std::vector<std::string> lines{"a callback threw: before the end",
                                 "a callback threw: at the end"};
  if (in_workers())
    lines.emplace_back("device 0 is lost");
  for (auto& x : lines)
    EXPECT_NE(end.out.find(x), std::string::npos) << to_string(end);
}

// In a process with only the library's objects, all destructors and exit handlers run.
TEST(ProcessReturnInOrder, DestroysStaticObjects) {
  TROUPE_HOST_ONLY("CUDA's exit handlers may not return");
  for (const auto* scenario : {"ReturnsAfterAFault", "ReturnsWhileALaneIsStuck"}) {
    const auto end = run_child(scenario, patience);
    EXPECT_TRUE(end.was_told("exit_handlers_ran")) << to_string(end);
    EXPECT_TRUE(end.was_told("static_objects_ended")) << to_string(end);
  }
}

} // namespace
} // namespace troupe::testing
