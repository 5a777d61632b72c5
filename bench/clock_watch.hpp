/// Tells a pause of the machine from one of the program.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <mutex>
#include <thread>
#include <vector>

namespace bench {

/// Threads that only look at the clock. If one of them could not for a while, another thread or the
/// host of a virtual machine had its CPU. There is one for eight CPUs, and none where there are
/// fewer. So they see what takes many CPUs away, and miss most of what takes one.
class clock_watch {
public:
  using clock = std::chrono::steady_clock;

  clock_watch();
  ~clock_watch();
  clock_watch(const clock_watch&) = delete;
  clock_watch& operator=(const clock_watch&) = delete;

  bool looks() const noexcept { return !threads_.empty(); }
  /// Returns the longest time on end between `from` and `to` in which one thread could not look.
  clock::duration missed(clock::time_point from, clock::time_point to) const;
  /// The same since the start.
  clock::duration missed() const { return missed(begun_, clock::now()); }

private:
  struct gap {
    clock::time_point from;
    clock::time_point to;
  };

  void look();

  const clock::time_point begun_ = clock::now();
  std::atomic<bool> over_{false};
  mutable std::mutex mutex_;
  std::vector<gap> gaps_;
  std::vector<std::thread> threads_;
};

} // namespace bench
