// Processes with little address space: there they get no more threads, and soon no memory.

#include "support/child_process.hpp"
#include "support/worker_losses.hpp"
#include <troupe/launch.hpp>
#include <troupe/troupe.hpp>

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include <sys/resource.h>
#include <unistd.h>

namespace troupe::testing {
namespace {

/// For each answer. A world that stands still gives none.
constexpr auto bound = 20s;

constexpr const char* of_all = "all";

caf::error limit_room(rlim_t size_bytes) {
  const rlimit room{size_bytes, size_bytes};
  return ::setrlimit(RLIMIT_AS, &room) == 0
             ? caf::error{}
             : make_error(errc::unavailable, "setrlimit failed: " + std::to_string(size_bytes));
}

/// Returns how much address space this process uses. @units bytes
rlim_t used_room() {
  rlim_t pages = 0;
  std::ifstream{"/proc/self/statm"} >> pages;
  return pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE));
}

/// Workers run the same binary, so the launch is registered there too.
const bool launch_registered = [] {
  const auto error = register_launch("keep its room",
                                     [](launch_context&, auto, auto, std::span<const std::byte> x) {
                                       rlim_t more = 0;
                                       std::memcpy(&more, x.data(), sizeof more);
                                       return limit_room(used_room() + more);
                                     });
  return !error;
}();

/// Accepts every answer but none.
template <class T> void await(const pending<T>& x) {
  const auto answered = x.wait_for(bound);
  if (!answered || !*answered || code_of(error_of(x.result())) == errc::deadline_exceeded)
    tell("stood_still");
}

/// Answers to requests of a world over two workers.
class tried_world {
public:
  explicit tried_world(test_system& system) : w_(system.open_world(limits())) {
    for (std::size_t i = 0; i < w_.size(); ++i)
      data_.push_back(must(w_.device_of(i).allocate<float>(1000)));
  }

  void keep_room(rlim_t more) const {
    await(w_.launch("keep its room", to_bytes(more), {}, {}, {.deadline = bound}));
  }
  void sum() const {
    for (std::size_t i = 0; i < w_.size(); ++i)
      await(w_.device_of(i).fill(data_[i], 1.F, {.deadline = bound}));
    await(w_.all_reduce(data_, reduce_op::sum, {.deadline = bound}));
  }
  void stall() const {
    const gate closed{true};
    const auto held = closed.hold_lane(w_.device_of(1), {}, {}, {.deadline = bound});
    await(w_.all_reduce(data_, reduce_op::sum, {.deadline = bound}));
  }

private:
  static world_config limits() {
    world_config result;
    result.limits.stall_limit = 200ms;
    result.limits.restarts = 5; // after 1.6 s
    return result;
  }

  const world w_;
  std::vector<gpu_ref<float>> data_;
};

TROUPE_CHILD(StallsInLittleRoom) {
  const std::string room = std::getenv("TROUPE_TEST_ROOM");
  if (room == of_all)
    must(limit_room(900'000'000));
  test_system system{in_worker_processes(2)};
  const tried_world w{system};
  w.sum();
  if (room != of_all)
    w.keep_room(std::stoull(room));
  for (int i = 0; i < 3; ++i) {
    w.stall();
    w.sum();
  }
  return 0;
}

class LittleRoom : public ::testing::TestWithParam<const char*> {};

/// Of all processes, or that of the workers beyond what they use. @units bytes
INSTANTIATE_TEST_SUITE_P(Room, LittleRoom, ::testing::Values(of_all, "0", "1000000", "10000000"),
                         [](const auto& x) { return std::string{"Of"} + x.param; });

TEST_P(LittleRoom, AWorldGoesOnOrEnds) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer needs more address space";
#endif
  TROUPE_HOST_ONLY("CUDA needs more address space");
  ASSERT_TRUE(launch_registered);
  const auto child =
      run_child("StallsInLittleRoom", 4 * bound, {std::string{"TROUPE_TEST_ROOM="} + GetParam()});
  EXPECT_TRUE(child.in_time) << to_string(child);
  EXPECT_FALSE(child.was_told("stood_still")) << to_string(child);
}

} // namespace
} // namespace troupe::testing
