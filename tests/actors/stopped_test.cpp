// SIGSTOP and SIGCONT for the program, its workers, or all of them.

#include "support/child_process.hpp"
#include "support/world_fixture.hpp"

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <sys/types.h>
#include <unistd.h>

namespace troupe::testing {
namespace {

constexpr auto stall_limit = 500ms;

/// Set by a signal handler on any thread.
std::atomic<int> went_on{0};
static_assert(std::atomic<int>::is_always_lock_free);

std::string workers_of_this_process() {
  std::string result;
  for (const auto& x : std::filesystem::directory_iterator{"/proc/self/task"}) {
    std::ifstream in{x.path() / "children"};
    for (std::string id; in >> id;)
      result += id + " ";
  }
  return result;
}

/// Computes sums, one at a time, until the test signals that the processes run again, and then a
/// few more.
int compute_until_it_went_on(std::chrono::nanoseconds limit) {
  if (std::signal(SIGUSR1, [](int) { went_on = 1; }) == SIG_ERR)
    return 1;
  auto plan = std::make_shared<fault_plan>();
  test_system system{{.faults = plan}};
  world_config settings;
  settings.limits.stall_limit = limit;
  auto w = system.open_world(settings);
  const auto x = must(w.allocate<float>(16));
  for (std::size_t i = 0; i < w.size(); ++i)
    EXPECT_TRUE(is_ok(answer_of(w.device_of(i).fill(x[i], 1.0F))));
  plan->add({.kind = fault::slow, .on = verb::collective, .times = 1'000'000, .delay = 100ms});
  tell("workers", workers_of_this_process());
  tell("computes", std::to_string(::getpid()));
  for (int behind = 0; behind < 5; behind += went_on)
    EXPECT_TRUE(is_ok(answer_of(w.all_reduce(x, reduce_op::max))));
  for (std::size_t i = 0; i < w.size(); ++i)
    EXPECT_TRUE(holds(w.device_of(i), x[i], std::vector<float>(16, 1)));
  EXPECT_EQ(w.status().epoch, 1U);
  return 0;
}

TROUPE_CHILD(ComputesWithAShortStallLimit) { return compute_until_it_went_on(stall_limit); }
TROUPE_CHILD(ComputesWithALongStallLimit) { return compute_until_it_went_on(patience); }

enum class who : std::uint8_t { program, workers, all };

void stand_still(const char* scenario, who stops, std::chrono::nanoseconds time) {
  running_child child{scenario};
  ASSERT_TRUE(child.wait_told("computes", patience)) << to_string(child.wait({}));
  const auto program = static_cast<pid_t>(std::stol(child.told("computes")));
  std::vector<pid_t> workers;
  std::istringstream ids{child.told("workers")};
  for (pid_t id = 0; ids >> id;)
    workers.push_back(id);
  EXPECT_EQ(workers.empty(), !in_workers());
  const auto signal_workers = [&](int number) {
    if (stops == who::program)
      return;
    for (const auto id : workers)
      EXPECT_EQ(::kill(id, number), 0);
  };
  signal_workers(SIGSTOP);
  if (stops != who::workers)
    child.stop();
  std::this_thread::sleep_for(time);
  if (stops != who::workers)
    child.go_on();
  signal_workers(SIGCONT);
  EXPECT_EQ(::kill(program, SIGUSR1), 0);
  const auto end = child.wait(2 * patience);
  EXPECT_EQ(end.status, 0) << to_string(end);
}

TEST(Stopped, AProgramGoesOn) {
  stand_still("ComputesWithAShortStallLimit", who::program, 4 * stall_limit);
}

TEST(Stopped, WorkersGoOn) {
  if (!in_workers())
    GTEST_SKIP() << "there are no workers";
  stand_still("ComputesWithALongStallLimit", who::workers, worker_settings{}.stuck_limit / 2);
}

TEST(Stopped, AllGoesOn) { stand_still("ComputesWithAShortStallLimit", who::all, 4 * stall_limit); }

} // namespace
} // namespace troupe::testing
