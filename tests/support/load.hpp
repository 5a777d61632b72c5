/// A client that keeps a world busy, and measures of resources that must not grow meanwhile.
#pragma once

#include "support/entries_of.hpp"
#include "support/world_fixture.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <fstream>
#include <thread>
#include <vector>

#include <malloc.h>
#include <unistd.h>

namespace troupe::testing {

inline std::size_t threads_of_this_process() { return entries_of("/proc/self/task"); }

/// Returns bytes, without free memory in the allocator's arenas. Short-lived threads, such as
/// threads that build communicators, leave much free memory in arenas.
inline std::size_t resident_memory() {
  ::malloc_trim(0);
  std::ifstream statm{"/proc/self/statm"};
  std::size_t total = 0;
  std::size_t resident = 0;
  statm >> total >> resident;
  return resident * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

/// Bytes that a sanitizer retains for a while after they were freed.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr std::size_t kept_by_sanitizer = std::size_t{512} << 20;
#else
inline constexpr std::size_t kept_by_sanitizer = 0;
#endif

/// Bytes by which the memory of a process may vary although nothing in it grows.
inline constexpr std::size_t memory_slack = (std::size_t{32} << 20) + kept_by_sanitizer;

/// Returns the bytes that malloc has allocated and not yet freed, in all arenas.
inline std::size_t allocated_memory() {
  const auto info = ::mallinfo2();
  return info.uordblks + info.hblkhd;
}

/// Returns true if the error reports the loss of a communicator or of device memory.
inline bool is_loss(const caf::error& why) {
  const auto code = code_of(why);
  return code == errc::stalled || code == errc::nccl_error || code == errc::worker_lost ||
         code == errc::stale_ref;
}

/// Runs a client that checks every sum. It allocates new buffers when its buffers are lost.
inline void add_up(const world& w, const std::atomic<bool>& stop, std::atomic<int>& right) {
  const auto n = static_cast<float>(w.size());
  std::vector<gpu_ref<float>> refs;
  while (!stop) {
    if (refs.empty()) {
      auto fresh = w.allocate<float>(64);
      ASSERT_TRUE(fresh || is_loss(fresh.error())) << describe(fresh.error());
      if (!fresh)
        continue;
      refs = std::move(*fresh);
    }
    bool filled = true;
    for (std::size_t i = 0; i < w.size(); ++i)
      filled = filled && answer_of(w.device_of(i).fill(refs[i], 1.F));
    if (!filled) {
      refs.clear();
      continue;
    }
    auto done = answer_of(w.all_reduce(refs));
    if (!done) {
      EXPECT_TRUE(is_loss(done.error())) << describe(done.error());
      refs.clear();
      continue;
    }
    for (std::size_t i = 0; i < w.size() && !refs.empty(); ++i) {
      auto got = w.device_of(i).download(refs[i]);
      if (!got) {
        ASSERT_TRUE(is_loss(got.error())) << describe(got.error());
        refs.clear();
      } else {
        ASSERT_EQ(*got, std::vector<float>(64, n));
      }
    }
    right += !refs.empty();
  }
}

/// A client whose sums must all be right, and none may fail, until it ends.
class steady_adder {
public:
  explicit steady_adder(world w) : world_(std::move(w)), thread_([this] { run(); }) {}
  ~steady_adder() { end(); }
  steady_adder(const steady_adder&) = delete;
  steady_adder& operator=(const steady_adder&) = delete;

  /// Ends, and returns the longest time from one right sum to the next.
  std::chrono::steady_clock::duration end() {
    stop_ = true;
    if (thread_.joinable())
      thread_.join();
    return longest_;
  }

private:
  void run() {
    auto refs = must(world_.allocate<float>(1024));
    auto last = std::chrono::steady_clock::now();
    while (!stop_) {
      for (std::size_t i = 0; i < world_.size(); ++i)
        must(answer_of(world_.device_of(i).fill(refs[i], 1.F)));
      must(answer_of(world_.all_reduce(refs)));
      const auto now = std::chrono::steady_clock::now();
      longest_ = std::max(longest_, now - last);
      last = now;
      ASSERT_EQ(must(world_.device_of(0).download(refs[0])),
                std::vector<float>(1024, static_cast<float>(world_.size())));
    }
  }

  world world_;
  std::atomic<bool> stop_{false};
  std::chrono::steady_clock::duration longest_{};
  std::thread thread_;
};

/// For EXPECT_TRUE: a client of `add_up` completes `more` correct sums.
inline ::testing::AssertionResult goes_on(const std::atomic<int>& right, int more) {
  const auto from = right.load();
  for (stopwatch watch; right < from + more; std::this_thread::yield())
    if (watch.elapsed() > patience)
      return ::testing::AssertionFailure() << "no sum is right any more";
  return ::testing::AssertionSuccess();
}

} // namespace troupe::testing
