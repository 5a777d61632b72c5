/// A client that keeps a world busy, and what a process has that must not grow meanwhile.
#pragma once

#include "support/world_fixture.hpp"

#include <atomic>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>
#include <vector>

#include <malloc.h>
#include <unistd.h>

namespace troupe::testing {

inline std::size_t threads_of_this_process() {
  const std::filesystem::directory_iterator tasks{"/proc/self/task"};
  return static_cast<std::size_t>(std::distance(begin(tasks), end(tasks)));
}

/// In bytes, without what is free in the allocator's arenas: threads that come and go, as those
/// that build communicators do, have many of them.
inline std::size_t resident_memory() {
  ::malloc_trim(0);
  std::ifstream statm{"/proc/self/statm"};
  std::size_t total = 0;
  std::size_t resident = 0;
  statm >> total >> resident;
  return resident * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

/// In bytes, what a sanitizer keeps for a while after it was freed.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr std::size_t kept_by_sanitizer = std::size_t{512} << 20;
#else
inline constexpr std::size_t kept_by_sanitizer = 0;
#endif

/// In bytes, by how much the memory of a process may differ of which nothing grows.
inline constexpr std::size_t memory_slack = (std::size_t{32} << 20) + kept_by_sanitizer;

/// In bytes, what malloc has given out and not got back, in all arenas.
inline std::size_t allocated_memory() {
  const auto info = ::mallinfo2();
  return info.uordblks + info.hblkhd;
}

/// Is it the end of a communicator, or of a device's memory?
inline bool is_loss(const caf::error& why) {
  const auto code = code_of(why);
  return code == errc::stalled || code == errc::nccl_error || code == errc::worker_lost ||
         code == errc::stale_ref;
}

/// A client that checks every sum, and takes new buffers when its old ones are lost.
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

/// For EXPECT_TRUE: such a client comes to `more` right sums.
inline ::testing::AssertionResult goes_on(const std::atomic<int>& right, int more) {
  const auto from = right.load();
  for (stopwatch watch; right < from + more; std::this_thread::yield())
    if (watch.elapsed() > patience)
      return ::testing::AssertionFailure() << "no sum is right any more";
  return ::testing::AssertionSuccess();
}

} // namespace troupe::testing
