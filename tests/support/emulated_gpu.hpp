/// Runs the kernels of direct collectives on host threads: one for each GPU thread. The loads and
/// stores that GPUs order are atomic, so a thread sanitizer finds what the kernels do not order.
#pragma once

#include "backend/cuda/direct_layout.hpp"

#include <array>
#include <atomic>
#include <barrier>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#define TROUPE_DEVICE inline
#define TROUPE_DEVICE_RARE inline
#define TROUPE_UNROLL

namespace troupe::testing {

/// The state that the threads of a block share.
struct emulated_block {
  explicit emulated_block(unsigned threads) : all(threads) {}

  std::barrier<> all;
  std::atomic<bool> votes[3] = {};
  alignas(16) std::byte shared[1024] = {};
};

struct emulated_thread {
  emulated_block* block = nullptr;
  unsigned thread = 0;
  unsigned threads = 0;
  unsigned block_x = 0;
  unsigned block_y = 0;
  unsigned grid_x = 0;
  unsigned grid_y = 0;
  unsigned votes = 0; ///< number of calls of `sync_or`
};

inline thread_local emulated_thread this_gpu_thread;

/// After so many packets, the thread that stored the last one sleeps, while what it sent is read.
/// 0: none sleeps.
inline std::atomic<unsigned> stores_between_delays = 0;

/// If set, the last thread of each block looks rarely at what it waits for.
inline std::atomic<bool> last_threads_look_rarely = false;

/// The clock of all GPUs. @units ns
inline std::atomic<std::uint64_t> emulated_nanoseconds = 0;

struct emulated_grid {
  unsigned x = 1;
  unsigned y = 1;
  unsigned threads = 1;
};

/// Runs `kernel(memory of the block)` on all threads of a grid, and returns when all have ended.
inline void run_emulated(const emulated_grid& grid, const std::function<void(void*)>& kernel) {
  std::vector<std::unique_ptr<emulated_block>> blocks;
  std::vector<std::jthread> threads;
  for (unsigned y = 0; y < grid.y; ++y)
    for (unsigned x = 0; x < grid.x; ++x) {
      blocks.push_back(std::make_unique<emulated_block>(grid.threads));
      for (unsigned i = 0; i < grid.threads; ++i)
        threads.emplace_back([&, block = blocks.back().get(), x, y, i] {
          this_gpu_thread = {block, i, grid.threads, x, y, grid.x, grid.y};
          kernel(block->shared);
        });
    }
}

} // namespace troupe::testing

namespace troupe::detail::direct::gpu {

struct alignas(16) vector {
  std::uint64_t words[2];
};

inline constexpr unsigned warp = 32;
inline constexpr unsigned looks_before_stop_check = 4;
inline constexpr unsigned looks_of_first_warp = 20;
inline constexpr unsigned looks_of_other_warps = 100;

inline troupe::testing::emulated_thread& self() { return troupe::testing::this_gpu_thread; }

inline unsigned thread() { return self().thread; }
inline unsigned threads() { return self().threads; }
inline unsigned block_x() { return self().block_x; }
inline unsigned block_y() { return self().block_y; }
inline unsigned grid_x() { return self().grid_x; }
inline unsigned grid_y() { return self().grid_y; }
inline void sync() { self().block->all.arrive_and_wait(); }

/// A thread is at most one round ahead of the others, so the flag of the round after the next one
/// is not in use.
inline bool sync_or(bool x) {
  auto& votes = self().block->votes;
  const unsigned round = self().votes++;
  if (x)
    votes[round % 3] = true;
  sync();
  if (thread() == 0)
    votes[(round + 2) % 3] = false;
  return votes[round % 3];
}

// Stores release and loads acquire, so that no fence is needed.
inline void fence_device() {}
inline void fence_system() {}
inline void fence_total() {}
inline void pause() {
  if (troupe::testing::last_threads_look_rarely && thread() + 1 == threads())
    std::this_thread::sleep_for(std::chrono::milliseconds{20});
  else
    std::this_thread::yield();
}

inline std::uint64_t nanoseconds() { return troupe::testing::emulated_nanoseconds; }

template <class T> std::atomic_ref<T> as_atomic(const T* x) {
  return std::atomic_ref<T>{const_cast<T&>(*x)};
}

inline std::uint32_t add(std::uint32_t* to, std::uint32_t x) { return as_atomic(to).fetch_add(x); }
inline std::uint32_t load(const std::uint32_t* from) { return as_atomic(from).load(); }
inline void store(std::uint32_t* to, std::uint32_t x) { as_atomic(to).store(x); }

/// Each half of a packet arrives whole, but not both halves at once.
inline std::uint64_t* halves_of(const packet* x) {
  return reinterpret_cast<std::uint64_t*>(const_cast<packet*>(x));
}

inline packet load(const packet* from) {
  const auto high = as_atomic(halves_of(from) + 1).load();
  const auto low = as_atomic(halves_of(from)).load();
  return std::bit_cast<packet>(std::array{low, high});
}

inline void store(packet* to, const packet& x) {
  const auto [low, high] = std::bit_cast<std::array<std::uint64_t, 2>>(x);
  as_atomic(halves_of(to)).store(low);
  as_atomic(halves_of(to) + 1).store(high);
  static std::atomic<unsigned> stores = 0;
  if (const auto each = troupe::testing::stores_between_delays.load();
      each != 0 && stores.fetch_add(1) % each == each - 1)
    std::this_thread::sleep_for(std::chrono::milliseconds{1});
}

inline channel_numbers load(const channel_numbers* from) {
  return {load(&from->sent), load(&from->acknowledged), load(&from->received), load(&from->read)};
}

inline float sum(float a, float b) { return a + b; }
inline double sum(double a, double b) { return a + b; }
inline float product(float a, float b) { return a * b; }
inline double product(double a, double b) { return a * b; }
template <class T> T least(T a, T b) {
  if (a == b)
    return std::signbit(a) ? a : b;
  return std::fmin(a, b);
}
template <class T> T greatest(T a, T b) {
  if (a == b)
    return std::signbit(a) ? b : a;
  return std::fmax(a, b);
}
inline float least(float a, float b) { return least<float>(a, b); }
inline double least(double a, double b) { return least<double>(a, b); }
inline float greatest(float a, float b) { return greatest<float>(a, b); }
inline double greatest(double a, double b) { return greatest<double>(a, b); }

} // namespace troupe::detail::direct::gpu

// They use what is defined above.
#include "backend/cuda/direct_move.hpp"
#include "backend/cuda/direct_pull.hpp"
#include "backend/cuda/direct_push.hpp"
#include "backend/cuda/direct_trade.hpp"
