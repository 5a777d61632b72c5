// Device code only: direct_communicator.cpp launches it.

#include "backend/cuda/direct_layout.hpp"

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#define TROUPE_DEVICE __device__ __forceinline__
#define TROUPE_DEVICE_RARE __device__ __noinline__ // takes no registers where it is not called
#define TROUPE_UNROLL _Pragma("unroll")

namespace troupe::detail::direct::gpu {

using vector = uint4;

inline constexpr unsigned warp = 32;
// The numbers of looks at device memory between two others, which are multiples of the first. 500
// looks take about 0.1 ms.
inline constexpr unsigned looks_before_stop_check = 64;
inline constexpr unsigned looks_of_first_warp = 512;
inline constexpr unsigned looks_of_other_warps = 16384;

TROUPE_DEVICE unsigned thread() { return threadIdx.x; }
TROUPE_DEVICE unsigned threads() { return blockDim.x; }
TROUPE_DEVICE unsigned block_x() { return blockIdx.x; }
TROUPE_DEVICE unsigned block_y() { return blockIdx.y; }
TROUPE_DEVICE unsigned grid_x() { return gridDim.x; }
TROUPE_DEVICE unsigned grid_y() { return gridDim.y; }
TROUPE_DEVICE void sync() { __syncthreads(); }
TROUPE_DEVICE bool sync_or(bool x) { return __syncthreads_or(x) != 0; }
/// Waits for the former work of the stream (`launch_early`).
TROUPE_DEVICE void wait_for_stream() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// CUDA's own fences are sequentially consistent, which takes longer.
TROUPE_DEVICE void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
TROUPE_DEVICE void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
/// In one order with those of all other devices.
TROUPE_DEVICE void fence_total() { asm volatile("fence.sc.sys;" ::: "memory"); }
TROUPE_DEVICE void pause() {}
TROUPE_DEVICE std::uint64_t nanoseconds() {
  std::uint64_t x;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(x));
  return x;
}
TROUPE_DEVICE std::uint32_t add(std::uint32_t* to, std::uint32_t x) { return atomicAdd(to, x); }

TROUPE_DEVICE std::uint32_t load(const std::uint32_t* from) {
  std::uint32_t x;
  asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}

TROUPE_DEVICE void store(std::uint32_t* to, std::uint32_t x) {
  asm volatile("st.volatile.global.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

/// Each half of a packet arrives whole, but not both halves at once.
/// @source PTX ISA, "Memory Consistency Model", "Vector Data-types"
TROUPE_DEVICE packet load(const packet* from) {
  std::uint64_t low;
  std::uint64_t high;
  asm volatile("ld.volatile.global.v2.u64 {%0,%1}, [%2];"
               : "=l"(low), "=l"(high)
               : "l"(from)
               : "memory");
  return {static_cast<std::uint32_t>(low), static_cast<std::uint32_t>(low >> 32),
          static_cast<std::uint32_t>(high), static_cast<std::uint32_t>(high >> 32)};
}

TROUPE_DEVICE void store(packet* to, const packet& x) {
  const auto low = std::uint64_t{x.low_mark} << 32 | x.low;
  const auto high = std::uint64_t{x.high_mark} << 32 | x.high;
  asm volatile("st.volatile.global.v2.u64 [%0], {%1,%2};" ::"l"(to), "l"(low), "l"(high)
               : "memory");
}

TROUPE_DEVICE channel_numbers load(const channel_numbers* from) {
  channel_numbers x;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.sent), "=r"(x.acknowledged), "=r"(x.received), "=r"(x.read)
               : "l"(from)
               : "memory");
  return x;
}

// Additions and products are rounded each by itself, so that all kernels give the same bits.
TROUPE_DEVICE float sum(float a, float b) { return __fadd_rn(a, b); }
TROUPE_DEVICE double sum(double a, double b) { return __dadd_rn(a, b); }
TROUPE_DEVICE float product(float a, float b) { return __fmul_rn(a, b); }
TROUPE_DEVICE double product(double a, double b) { return __dmul_rn(a, b); }
// -0 is less than +0, and a NaN counts only if both are NaNs.
TROUPE_DEVICE float least(float a, float b) { return fminf(a, b); }
TROUPE_DEVICE double least(double a, double b) { return fmin(a, b); }
TROUPE_DEVICE float greatest(float a, float b) { return fmaxf(a, b); }
TROUPE_DEVICE double greatest(double a, double b) { return fmax(a, b); }

} // namespace troupe::detail::direct::gpu

#include "backend/cuda/direct_kernels.hpp"
#include "backend/cuda/direct_move.hpp"
#include "backend/cuda/direct_pull.hpp"
#include "backend/cuda/direct_push.hpp"
#include "backend/cuda/direct_trade.hpp"

namespace {

namespace direct = troupe::detail::direct;

/// Vectors of type `T` that a thread reads from one rank at once: fewer for narrow elements, which
/// take more registers.
template <class T> constexpr unsigned unrolled = sizeof(T) >= 4 ? 3 : sizeof(T) == 2 ? 2 : 1;

} // namespace

#define TROUPE_PUSH(name, type)                                                                    \
  extern "C" __global__ void __launch_bounds__(direct::block_threads, direct::pushing_blocks)      \
      push_##name(const __grid_constant__ direct::plane p,                                         \
                  const __grid_constant__ direct::reduce_arguments a) {                            \
    __shared__ direct::shared_numbers shared;                                                      \
    direct::gpu::wait_for_stream();                                                                \
    direct::push_reduce<type>(p, a, shared);                                                       \
  }
TROUPE_DIRECT_TYPES(TROUPE_PUSH)

#define TROUPE_PULL(name, type)                                                                    \
  extern "C" __global__ void __launch_bounds__(direct::pulling_threads, direct::pulling_blocks)    \
      pull_##name(const __grid_constant__ direct::plane p,                                         \
                  const __grid_constant__ direct::reduce_arguments a) {                            \
    __shared__ direct::shared_facts<type> shared;                                                  \
    direct::gpu::wait_for_stream();                                                                \
    direct::pull_reduce<type, unrolled<type>>(p, a, shared);                                       \
  }
TROUPE_DIRECT_TYPES(TROUPE_PULL)

#define TROUPE_MOVE(name, most)                                                                    \
  extern "C" __global__ void __launch_bounds__(direct::block_threads, direct::moving_blocks)       \
      move_##name(const __grid_constant__ direct::plane p,                                         \
                  const __grid_constant__ direct::move_arguments<most> a) {                        \
    __shared__ std::uint64_t wanted_at;                                                            \
    direct::gpu::wait_for_stream();                                                                \
    direct::move(p, a, wanted_at);                                                                 \
  }
TROUPE_DIRECT_MOVES(TROUPE_MOVE)

#define TROUPE_TRADE(name, most)                                                                   \
  extern "C" __global__ void __launch_bounds__(direct::block_threads, direct::moving_blocks)       \
      trade_##name(const __grid_constant__ direct::plane p,                                        \
                   const __grid_constant__ direct::move_arguments<most> a) {                       \
    __shared__ direct::shared_numbers shared;                                                      \
    direct::gpu::wait_for_stream();                                                                \
    direct::trade(p, a, shared);                                                                   \
  }
TROUPE_DIRECT_TRADES(TROUPE_TRADE)
