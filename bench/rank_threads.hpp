/// One thread per rank, started together, for one or many steps.
#pragma once

#include "contestant.hpp"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <thread>
#include <vector>

namespace bench {

using clock = std::chrono::steady_clock;

inline double microseconds(clock::duration time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

/// State shared by the threads of a run; each word on its own cache line.
struct handshake {
  alignas(64) std::atomic<std::size_t> started{0}; ///< number of steps that the ranks may do
  alignas(64) std::atomic<std::size_t> arrived{0}; ///< arrivals of ranks, over all steps

  void arrive() { arrived.fetch_add(1, std::memory_order_release); }
  void await(std::size_t arrivals) const {
    spin_until([&] { return arrived.load(std::memory_order_acquire) == arrivals; });
  }
  void await_start(std::size_t steps) const {
    spin_until([&] { return started.load(std::memory_order_acquire) >= steps; });
  }

private:
  /// Yields after a while, for machines with fewer cores than threads.
  template <class F> static void spin_until(F f) {
    for (int i = 0; !f(); ++i)
      if (i > 10'000)
        std::this_thread::yield();
  }
};

/// Runs `steps` steps on one thread per rank. `make(rank)`, called on the rank's thread, returns
/// the function for a step. All ranks begin each step together; a step lasts until the last rank is
/// done.
template <class Make> timing in_steps(std::size_t ranks, std::size_t steps, Make make) {
  handshake shared;
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      auto step = make(rank);
      shared.arrive();
      for (std::size_t k = 1; k <= steps; ++k) {
        shared.await_start(k);
        step();
        shared.arrive();
      }
    });
  shared.await(ranks);
  timing result;
  result.each.reserve(steps);
  const auto begin = clock::now();
  for (std::size_t k = 1; k <= steps; ++k) {
    const auto start = clock::now();
    shared.started.store(k, std::memory_order_release);
    shared.await((k + 1) * ranks);
    result.each.push_back(microseconds(clock::now() - start));
  }
  result.per_operation = microseconds(clock::now() - begin) / static_cast<double>(steps);
  for (auto& x : threads)
    x.join();
  return result;
}

/// Does the same in one step that has `operations`.
template <class Make> timing in_one_step(std::size_t ranks, std::size_t operations, Make make) {
  auto result = in_steps(ranks, 1, make);
  result.each.clear();
  result.per_operation /= static_cast<double>(operations);
  return result;
}

} // namespace bench
