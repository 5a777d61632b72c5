/// Faults that end CUDA in a process, and conditions that must not end it, with collectives of all
/// ranks in flight. Each case runs in a child process. Environment: TROUPE_FAULT_REPEATS (number of
/// processes that fault), TROUPE_RETIRE_CYCLES (number of times that a world continues).

#include "support/child_process.hpp"
#include "support/collective_round.hpp"
#include "support/control_timer.hpp"
#include "support/faulty_kernels.hpp"
#include "support/load.hpp"
#include "support/world_fixture.hpp"

#include <cuda_runtime_api.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace troupe::testing {

namespace {

using clock = std::chrono::steady_clock;
using std::chrono::nanoseconds;

constexpr nanoseconds answer_bound = 100ms;
constexpr nanoseconds exit_bound = 2s;
constexpr nanoseconds child_limit = 120s;
constexpr int exit_status = 43;
constexpr int return_status = 7;

int number_of(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::atoi(text);
}

std::string assign(const char* variable, int value) {
  return std::string{variable} + "=" + std::to_string(value);
}

double ms(nanoseconds x) { return std::chrono::duration<double, std::milli>(x).count(); }

caf::error check_cuda(int code) {
  return code == cudaSuccess
             ? caf::error{}
             : make_error(errc::cuda_error, cudaGetErrorName(static_cast<cudaError_t>(code)));
}

// -- a fault under load

/// Records the time and the error of each of many requests.
class answer_log final : public executor {
public:
  struct answer {
    clock::time_point when;
    caf::error why;
  };

  /// Runs on the completing thread, so that the recorded time is the time of completion.
  void post(std::function<void()> task) override { task(); }

  template <class T> void watch(const pending<T>& x) {
    ++asked_;
    x.then(*this, [this](const caf::expected<T>& result) {
      const auto now = clock::now();
      std::lock_guard lock{mutex_};
      all_.push_back({now, error_of(result)});
      changed_.notify_all();
    });
  }

  /// Blocks until all requests are completed. Returns false after `limit`.
  bool wait(nanoseconds limit) {
    std::unique_lock lock{mutex_};
    return changed_.wait_for(lock, limit, [this] { return all_.size() == asked_; });
  }

  std::size_t asked() const { return asked_; }
  std::vector<answer> all() const {
    std::lock_guard lock{mutex_};
    return all_;
  }

private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t asked_ = 0;
  std::vector<answer> all_;
};

constexpr std::size_t sizes[] = {2, 4096, 1 << 18, 1 << 22};
constexpr std::size_t before_the_fault = 100;
constexpr std::size_t behind_the_fault = 300;

/// Two overlapping worlds with buffers of several sizes.
struct loaded_program {
  test_system system{{.devices = 8}};
  world w = system.open_world();
  world other = system.open_world({.devices = {1, 0}, .name = "other"});
  world_feed feed{system, w.actor()};
  world_feed other_feed{system, other.actor()};
  std::vector<std::vector<any_gpu_ref>> refs;
  std::vector<any_gpu_ref> others = must(other.allocate(dtype::float32, 4096, true));
  std::vector<any_gpu_ref> alone = must(w.allocate(dtype::float32, 1 << 16, true));
  std::deque<std::vector<std::byte>> hosts;
  answer_log log;

  loaded_program() {
    for (const auto size : sizes)
      refs.push_back(must(w.allocate(dtype::float32, size, true)));
  }

  /// Requests sums of all ranks, and regularly fills of single devices.
  void ask(std::size_t times) {
    for (std::size_t i = 0; i < times; ++i) {
      log.watch(w.all_reduce(refs[i % refs.size()]));
      if (i % 4 == 0)
        log.watch(other.all_reduce(others));
      if (i % 16 == 0)
        for (std::size_t rank = 0; rank < w.size(); ++rank) {
          const auto gpu = w.device_of(rank);
          log.watch(gpu.fill(alone[rank], same_bytes(alone[rank])));
          auto& host = hosts.emplace_back(alone[rank].size_bytes());
          log.watch(gpu.download(alone[rank], std::span{host}));
        }
    }
  }

  /// Makes calls without a stream, as in user code compiled for per-thread default streams.
  void use_own_streams_of_lanes() {
    for (std::size_t rank = 0; rank < w.size(); ++rank)
      log.watch(w.device_of(rank).launch(
          [](launch_context&) {
            void* memory = nullptr;
            if (auto err = check_cuda(cudaMallocAsync(&memory, 1 << 20, cudaStreamPerThread)))
              return err;
            if (auto err = check_cuda(cudaFreeAsync(memory, cudaStreamPerThread)))
              return err;
            return check_cuda(cudaStreamSynchronize(cudaStreamPerThread));
          },
          {}, {}));
  }

  void launch(kernel_fault what, std::size_t rank) {
    log.watch(w.device_of(rank).launch(
        [what](launch_context& context) {
          return check_cuda(launch_faulty(what, context.cuda_stream()));
        },
        {}, {}));
  }

  void expect_lost() {
    tell("phase", to_string(feed.until(world_phase::failed).phase));
    tell("phase", to_string(other_feed.until(world_phase::failed).phase));
    for (auto& x : refs)
      for (auto& ref : x)
        EXPECT_TRUE(ref.stale());
    for (auto& ref : others)
      EXPECT_TRUE(ref.stale());
    EXPECT_TRUE(has_code(answer_of(w.all_reduce(refs[0])), errc::unavailable));
    for (std::size_t rank = 0; rank < w.size(); ++rank)
      EXPECT_TRUE(has_code(answer_of(w.device_of(rank).stats()), errc::unavailable));
  }
};

/// Reports the data that the parent checks.
void tell_answers(const answer_log& log) {
  const auto all = log.all();
  std::vector<clock::time_point> failed;
  std::set<std::string> causes;
  auto last = clock::time_point::min();
  for (auto& x : all) {
    last = std::max(last, x.when);
    if (!x.why)
      continue;
    failed.push_back(x.when);
    if (!causes.insert(describe(x.why)).second)
      continue;
    const auto why = failure_of(x.why).value_or(failure{});
    tell("cause", describe(x.why));
    tell("code", to_string(why.code));
    tell("severity", to_string(severity_of(why.code)));
    tell("native_code", std::to_string(why.native_code));
    tell("origin", std::to_string(why.device));
  }
  tell("unanswered", std::to_string(log.asked() - all.size()));
  tell("failed", std::to_string(failed.size()));
  if (!failed.empty()) {
    const auto first = *std::min_element(failed.begin(), failed.end());
    tell("answered_after", std::to_string(nanoseconds{last - first}.count()));
  }
}

kernel_fault wanted_fault() {
  return all_kernel_faults.at(static_cast<std::size_t>(number_of("TROUPE_TEST_FAULT", 0)));
}

int leave() {
  const bool by_return = number_of("TROUPE_TEST_RETURN", 0) != 0;
  tell_time("left");
  if (!by_return)
    exit_process(exit_status, "the devices are lost");
  return return_status;
}

TROUPE_CHILD(FaultsUnderLoad) {
  loaded_program program;
  program.use_own_streams_of_lanes();
  const auto rank = static_cast<std::size_t>(number_of("TROUPE_TEST_RANK", 0));
  {
    std::vector<gate> held(program.w.size()); // all requests are made before any of them runs
    for (std::size_t i = 0; i < held.size(); ++i)
      program.log.watch(held[i].hold_lane(program.w.device_of(i)));
    for (auto& x : held)
      EXPECT_TRUE(x.wait_reached());
    program.ask(before_the_fault);
    program.launch(wanted_fault(), rank);
    program.ask(behind_the_fault);
  }
  control_timer control;
  EXPECT_TRUE(program.log.wait(10s));
  tell("control", std::to_string(nanoseconds{control.worst()}.count()));
  tell_answers(program.log);
  program.expect_lost();
  return leave();
}

TROUPE_CHILD(FaultsWhereNothingElseRuns) {
  loaded_program program;
  program.ask(1);
  EXPECT_TRUE(program.log.wait(10s));
  program.launch(wanted_fault(), static_cast<std::size_t>(number_of("TROUPE_TEST_RANK", 0)));
  EXPECT_TRUE(program.log.wait(10s));
  tell_answers(program.log);
  program.expect_lost();
  return leave();
}

/// Checks that are the same for every fault.
void expect_told(const child_end& end, kernel_fault what, int device, bool only_one) {
  ASSERT_TRUE(end.in_time) << to_string(end);
  EXPECT_EQ(end.value("unanswered"), "0");
  EXPECT_EQ(end.values("cause").size(), 1u) << to_string(end); // INV-7
  EXPECT_EQ(end.value("code"), "device_fault");
  EXPECT_EQ(end.value("severity"), "process");
  EXPECT_TRUE(may_give(what, std::stoi(end.value("native_code")))) << to_string(end);
  const auto origin = end.value("origin");
  EXPECT_TRUE(origin == std::to_string(device) || origin == "-1") << to_string(end);
  if (only_one) {
    EXPECT_EQ(origin, std::to_string(device)) << to_string(end);
  }
  EXPECT_EQ(end.values("phase"), (std::vector<std::string>{"failed", "failed"}));
}

/// Times of the processes of one test.
class times {
public:
  explicit times(const char* what) : what_(what) {}
  ~times() {
    if (all_.empty())
      return;
    std::sort(all_.begin(), all_.end());
    std::printf("%s: max %.2f ms, median %.2f ms, of %zu\n", what_, ms(all_.back()),
                ms(all_[all_.size() / 2]), all_.size());
  }
  times(const times&) = delete;
  times& operator=(const times&) = delete;

  void add(nanoseconds x) { all_.push_back(x); }

private:
  const char* what_;
  std::vector<nanoseconds> all_;
};

TEST(ProcessFault, AnswersEverybodyWithOneCauseAndLetsTheProcessEnd) {
  TROUPE_NEEDS_GPUS(2);
  const int devices = std::min(gpus_present(), 8);
  times answered{"everything answered, after the first sign"};
  times exited{"the process over, after exit_process"};
  times returned{"the process over, after the return from main began"};
  const int repeats = number_of("TROUPE_FAULT_REPEATS", 6);
  control_timer control;
  for (int i = 0; i < repeats; ++i) {
    const auto kind = static_cast<std::size_t>(i) % all_kernel_faults.size();
    const bool by_return = i / static_cast<int>(all_kernel_faults.size()) % 2 == 1;
    const int device = i % devices;
    const auto end = run_child("FaultsUnderLoad", child_limit,
                               {assign("TROUPE_TEST_FAULT", static_cast<int>(kind)),
                                assign("TROUPE_TEST_RANK", device),
                                assign("TROUPE_TEST_RETURN", by_return ? 1 : 0)});
    SCOPED_TRACE(i);
    expect_told(end, all_kernel_faults.at(kind), device, false);
    if (HasFatalFailure())
      return;
    EXPECT_EQ(end.status, by_return ? return_status : exit_status) << to_string(end);
    EXPECT_GE(std::stoi(end.value("failed")), static_cast<int>(behind_the_fault)) << to_string(end);
    const nanoseconds after{std::stoll(end.value("answered_after"))};
    EXPECT_LT(after, answer_bound + nanoseconds{std::stoll(end.value("control"))})
        << to_string(end);
    answered.add(after);
    EXPECT_LT(end.since("left"), exit_bound + control.worst()) << to_string(end);
    (by_return ? returned : exited).add(end.since("left"));
  }
}

TEST(ProcessFault, HasTheOnlyDeviceAtWorkAsItsOrigin) {
  TROUPE_NEEDS_GPUS(2);
  for (int device = 0; device < 2; ++device) {
    const auto kind = static_cast<std::size_t>(device);
    const auto end = run_child(
        "FaultsWhereNothingElseRuns", child_limit,
        {assign("TROUPE_TEST_FAULT", static_cast<int>(kind)), assign("TROUPE_TEST_RANK", device)});
    SCOPED_TRACE(device);
    expect_told(end, all_kernel_faults.at(kind), device, true);
    EXPECT_EQ(end.status, exit_status) << to_string(end);
  }
}

// -- a rank that is not issued

constexpr auto short_stall = 150ms;

/// An operation that may be the first one of a world.
struct first_operation {
  std::string name;
  std::function<pending<collective_done>(const world&)> ask;
};

std::vector<first_operation> first_operations() {
  std::vector<first_operation> result;
  for (const auto kind : round_kinds)
    result.push_back({std::string{to_string(kind)}, [kind](const world& w) {
                        const round_of round{w,
                                             {.what = kind, .type = dtype::float32, .count = 64}};
                        return w.run(round.request());
                      }});
  result.push_back({"barrier", [](const world& w) { return w.barrier(); }});
  result.push_back({"send_recv", [](const world& w) {
                      const auto refs = must(w.allocate(dtype::float32, 64, true));
                      return w.send_recv(0, refs[0], 1, refs[1]);
                    }});
  result.push_back({"group", [](const world& w) {
                      const auto a = must(w.allocate(dtype::float32, 64, true));
                      const auto b = must(w.allocate(dtype::int32, 64, true));
                      group both;
                      for (auto& x : {a, b}) {
                        collective call;
                        call.send = x;
                        both.calls.push_back(std::move(call));
                      }
                      return w.run(both);
                    }});
  return result;
}

/// Rank 1's lane is blocked in the call, and the rank takes no part, when the others stall.
TROUPE_CHILD(ARankIsNotIssuedInTheFirstOperation) {
  const auto plan = std::make_shared<fault_plan>();
  test_system system{{.devices = 4, .faults = plan}};
  set_log_sink([](const log_line&) {});
  world_config config;
  config.limits.stall_limit = short_stall;
  config.limits.quiet_limit = 10s;
  for (auto& first : first_operations()) {
    SCOPED_TRACE(first.name);
    const auto w = system.open_world(config);
    world_feed feed{system, w.actor()};
    control_timer control;
    plan->add({fault::block, verb::collective, 1});
    const auto before = plan->injected(fault::block);
    const auto request = first.ask(w);
    EXPECT_TRUE(plan->wait_injected(fault::block, before + 1, patience));
    const auto reached = clock::now(); // the other ranks may have started slightly earlier
    const auto answer = answer_of(request);
    const nanoseconds after = clock::now() - reached;
    plan->release();
    EXPECT_TRUE(has_code(answer, errc::stalled));
    const auto why = failure_of(error_of(answer)).value_or(failure{});
    EXPECT_EQ(why.rank, 1) << to_string(why);
    EXPECT_EQ(why.device, 1);
    EXPECT_TRUE(why.parts.size() > 1 && why.parts[1] == part_state::not_issued) << to_string(why);
    EXPECT_LT(after, short_stall + 5ms + control.worst());
    tell("reported", first.name + " " + std::to_string(ms(after - short_stall)));
    EXPECT_EQ(feed.until(world_phase::ready, 2).epoch, 2u);
    EXPECT_TRUE(works(w));
  }
  // The same if the call returns success.
  const auto w = system.open_world(config);
  plan->add({fault::not_issued, verb::collective, 1});
  control_timer control;
  const stopwatch since;
  const auto answer = answer_of(w.barrier());
  const auto after = since.elapsed();
  EXPECT_TRUE(has_code(answer, errc::stalled));
  EXPECT_LT(after, short_stall + 5ms + control.worst());
  EXPECT_TRUE(works(w));
  return 0;
}

TEST(RankNotIssued, IsNamedInTheFirstOperationOfEachKind) {
  TROUPE_NEEDS_GPUS(2);
  const auto end = run_child("ARankIsNotIssuedInTheFirstOperation", 2 * child_limit);
  EXPECT_EQ(end.status, 0) << to_string(end);
  for (auto& x : end.values("reported"))
    std::printf("%s ms after the stall limit\n", x.c_str());
}

// -- kernels that are loaded at their first launch

launch_function launch_fresh_on(gpu_ref<std::uint32_t> x, std::size_t which,
                                std::shared_ptr<flag> reached) {
  return [x, which, reached](launch_context& context) -> caf::error {
    auto memory = x.access();
    if (!memory)
      return memory.error();
    reached->set();
    return check_cuda(launch_fresh(which, *memory, x.count(), context.cuda_stream()));
  };
}

/// Rank 0's part of a sum is on the GPU, and its lane loads a kernel. Then rank 1's lane loads
/// another kernel before its part of the sum.
TROUPE_CHILD(LoadsKernelsBetweenTheRanks) {
  test_system system{{.devices = 4}};
  const auto w = system.open_world();
  const auto n = static_cast<float>(w.size());
  constexpr std::size_t count = 4096;
  const auto refs = must(w.allocate<float>(count));
  const auto touched = must(w.allocate<std::uint32_t>(count, true));
  for (std::size_t round = 0; 2 * round + 1 < fresh_kernels; ++round) {
    SCOPED_TRACE(round);
    for (std::size_t i = 0; i < w.size(); ++i) {
      must(answer_of(w.device_of(i).fill(refs[i], 1.F)));
      must(answer_of(w.device_of(i).fill(touched[i], 0u)));
    }
    const auto first = w.device_of(0);
    const auto second = w.device_of(1);
    const auto loads_on_first = std::make_shared<flag>();
    const auto loads_on_second = std::make_shared<flag>();
    gate held;
    auto holding = held.hold_lane(second);
    EXPECT_TRUE(held.wait_reached());
    auto on_second = second.launch(launch_fresh_on(touched[1], 2 * round + 1, loads_on_second),
                                   {touched[1]}, {touched[1]});
    auto sum = w.all_reduce(refs, reduce_op::sum, {.deadline = 20s});
    auto on_first = first.launch(launch_fresh_on(touched[0], 2 * round, loads_on_first),
                                 {touched[0]}, {touched[0]});
    auto next = w.all_reduce(refs, reduce_op::sum, {.deadline = 20s});
    EXPECT_TRUE(loads_on_first->wait());
    EXPECT_FALSE(loads_on_second->is_set());
    held.open();
    const stopwatch since;
    EXPECT_TRUE(is_ok(answer_of(holding)));
    EXPECT_TRUE(is_ok(answer_of(on_second)));
    EXPECT_TRUE(is_ok(answer_of(sum)));
    EXPECT_TRUE(is_ok(answer_of(on_first)));
    EXPECT_TRUE(is_ok(answer_of(next)));
    if (::testing::UnitTest::GetInstance()->ad_hoc_test_result().Failed())
      exit_process(1, "a kernel that was loaded holds up a sum"); // the lanes may be stuck
    tell("round", std::to_string(ms(since.elapsed())));
    for (std::size_t i = 0; i < w.size(); ++i)
      EXPECT_EQ(must(w.device_of(i).download(refs[i])), std::vector<float>(count, n * n));
    for (std::size_t i = 0; i < 2; ++i)
      EXPECT_EQ(must(w.device_of(i).download(touched[i])),
                std::vector<std::uint32_t>(count, static_cast<std::uint32_t>(2 * round + i + 1)));
  }
  return 0;
}

class FreshKernel : public ::testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(Loading, FreshKernel, ::testing::Values("LAZY", "EAGER"),
                         [](const auto& x) { return std::string{x.param}; });

TEST_P(FreshKernel, BetweenTwoRanksHoldsUpNobody) {
  TROUPE_NEEDS_GPUS(2);
  const auto end = run_child("LoadsKernelsBetweenTheRanks", child_limit,
                             {std::string{"CUDA_MODULE_LOADING="} + GetParam()});
  EXPECT_EQ(end.status, 0) << to_string(end);
  times took{"a kernel loaded on either side of a sum, and the sums"};
  for (auto& x : end.values("round"))
    took.add(std::chrono::duration_cast<nanoseconds>(
        std::chrono::duration<double, std::milli>{std::stod(x)}));
}

// -- many cycles

std::size_t used_on(int device) {
  std::size_t free = 0;
  std::size_t total = 0;
  must(check_cuda(cudaSetDevice(device)));
  must(check_cuda(cudaMemGetInfo(&free, &total)));
  return total - free;
}

/// Returns the bytes in use on the system's devices, by all processes.
std::vector<std::size_t> device_memory(const test_system& system) {
  std::vector<std::size_t> result;
  for (const int x : system.ordinals())
    result.push_back(used_on(x));
  return result;
}

constexpr std::size_t mib = std::size_t{1} << 20;

TROUPE_CHILD(GoesOnUnderLoad) {
  const int cycles = number_of("TROUPE_RETIRE_CYCLES", 5);
  constexpr int warm = 10; // after these cycles all one-time allocations are done
  const auto plan = std::make_shared<fault_plan>();
  test_system system{{.devices = 2, .faults = plan}};
  set_log_sink([](const log_line&) {});
  world_config config;
  config.limits.standby = standby_policy::communicators;
  config.limits.stall_limit = 200ms;
  config.limits.restart_backoff = 0ms;
  config.limits.restarts = 1 << 20;
  config.limits.quiet_limit = 10s;
  const auto w = system.open_world(config);
  world_feed feed{system, w.actor()};
  auto until_standby = [&] {
    return feed.until([from = w.status().epoch](const world_status& x) {
      return x.phase == world_phase::ready && x.standby_ready && x.epoch >= from;
    });
  };
  std::atomic<bool> stop = false;
  std::atomic<int> right = 0;
  std::vector<std::thread> clients;
  for (int i = 0; i < 3; ++i)
    clients.emplace_back([&] { add_up(w, stop, right); });
  std::size_t threads = 0;
  std::size_t resident = 0;
  std::size_t allocated = 0;
  std::vector<std::size_t> used;
  for (int i = 0; i < warm + cycles; ++i) {
    const auto epoch = until_standby().epoch;
    if (i == warm) {
      threads = threads_of_this_process();
      resident = resident_memory();
      allocated = allocated_memory();
      used = device_memory(system);
    }
    const auto before = right.load();
    plan->add({i % 2 == 0 ? fault::not_issued : fault::fail, verb::collective, i % 3 == 0 ? 0 : 1});
    feed.until([&](const world_status& x) { return x.epoch > epoch; });
    if (i % 20 == warm)
      tell("resident_mib_on_the_way", std::to_string(resident_memory() / mib));
    while (right < before + 5)
      std::this_thread::yield();
  }
  until_standby();
  const auto threads_after = threads_of_this_process();
  const auto resident_after = resident_memory();
  const auto allocated_after = allocated_memory();
  const auto used_after = device_memory(system);
  stop = true;
  for (auto& x : clients)
    x.join();
  tell("threads", std::to_string(threads) + " " + std::to_string(threads_after));
  tell("resident_mib", std::to_string(resident / mib) + " " + std::to_string(resident_after / mib));
  tell("allocated_mib",
       std::to_string(allocated / mib) + " " + std::to_string(allocated_after / mib));
  EXPECT_LE(threads_after, threads + 4);
  EXPECT_LE(resident_after, resident + 64 * mib);
  EXPECT_LE(allocated_after, allocated + 16 * mib);
  for (std::size_t i = 0; i < used.size(); ++i) {
    tell("device_mib", std::to_string(used[i] / mib) + " " + std::to_string(used_after[i] / mib));
    EXPECT_LE(used_after[i], used[i] + 64 * mib);
  }
  EXPECT_TRUE(works(w));
  return 0;
}

TEST(Retire, GoesOnUnderLoadWithoutGrowth) {
  TROUPE_NEEDS_GPUS(2);
  // The many short-lived threads that NCCL uses to build a communicator share one arena. With
  // several arenas, each keeps free pages, and resident memory grows although none of it is in use.
  const auto end = run_child("GoesOnUnderLoad", 850s, {"MALLOC_ARENA_MAX=1"});
  EXPECT_EQ(end.status, 0) << to_string(end);
  for (auto& [what, values] : end.told)
    std::printf("%s: %s\n", what.c_str(), values.c_str());
}

} // namespace

} // namespace troupe::testing
