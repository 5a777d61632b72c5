/// nccl_communicator: connects the ranks before the first call.
#include "backend/cuda/cuda_error.hpp"
#include "backend/cuda/cuda_functions.hpp"
#include "backend/cuda/device_guard.hpp"
#include "backend/cuda/nccl_communicator.hpp"
#include "backend/cuda/nccl_group.hpp"
#include "foundation/error_text.hpp"
#include <troupe/backend.hpp>
#include <troupe/error.hpp>

#include <cuda_runtime_api.h>
#include <driver_types.h>
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>

namespace troupe::detail {

namespace {

/// NCCL connects an algorithm (tree, ring, NVLink SHARP, ...) at its first use, and chooses it by
/// kind, operation and size. These sizes cover all its choices. A sum can run in the switch, a
/// product never does.
/// @units bytes of the larger one of a rank's buffers
constexpr std::size_t warm_up_sizes[] = {
    8, 64, 512, 4096, 32768, 1u << 18, 1u << 21, 1u << 24, connect_scratch_bytes};
constexpr ncclRedOp_t warm_up_ops[] = {ncclSum, ncclProd};

/// The more collectives a group has per channel (up to 64 channels), the less NCCL prefers the
/// ring. Such groups use algorithms that a single collective never uses.
/// @source NCCL 2.28.9, `ncclTopoGetAlgoTime` (src/graph/tuning.cc)
constexpr int warm_up_group = 256;

/// @units bytes that each pair of ranks exchanges
constexpr std::size_t pair_bytes = 1024;

/// An upper bound for one communicator of two ranks with all its connections.
/// @units bytes of device memory
/// @source measured with NCCL 2.28 on two H100 in one process: 868 MiB; 1346 MiB for a first one
constexpr std::size_t build_bytes = std::size_t{1280} << 20;

/// The same for the first one of the process on a device, with what NCCL loads there.
/// @units bytes
constexpr std::size_t first_build_bytes = std::size_t{2} << 30;

/// The memory that each further rank of a host adds at most.
/// @units bytes
/// @source the memory of worlds with standbys on 2 and on 4 GPUs (docs/performance.md)
constexpr std::size_t further_rank_bytes = std::size_t{640} << 20;

/// One bit for each device on which NCCL has loaded what all communicators of the process share.
std::atomic<std::uint64_t> devices_of_nccl{0};

constexpr std::uint64_t bit_of(int device) noexcept { return std::uint64_t{1} << (device % 64); }

} // namespace

std::size_t needed_bytes(int device, int size) noexcept {
  const bool is_first = (devices_of_nccl.load() & bit_of(device)) == 0;
  constexpr int most_ranks = 8; // with which a rank has connections of its own
  const auto further = static_cast<std::size_t>(std::clamp(size, 2, most_ranks) - 2);
  return (is_first ? first_build_bytes : build_bytes) + further * further_rank_bytes;
}

caf::error nccl_communicator::connect(stream_view stream, connect_scope what) noexcept {
  if (size_ == 1 || !scratch_) // nothing to connect, or all is connected
    return {};
  if (auto err = driver_->check(device()))
    return err;
  if (auto err = check(select_device(device()), "cudaSetDevice", device()))
    return err;
  auto* const memory = static_cast<std::byte*>(scratch_.get().pointer);
  const auto on = static_cast<cudaStream_t>(stream.native);
  if (!collectives_connected_)
    if (auto err = warm_up_collectives(memory, on))
      return err;
  collectives_connected_ = true;
  devices_of_nccl.fetch_or(bit_of(device()));
  if (what == connect_scope::collectives)
    return wait_connected(on);
  if (auto err = warm_up_groups(memory, on))
    return err;
  if (auto err = warm_up_pairs(memory, on))
    return err;
  if (auto err = wait_connected(on))
    return err;
  // Not freed in `stream`: once a stream has used a pool, each of its events costs the host twice
  // the time. So do the events of all streams that wait for it, and each NCCL call has four.
  scratch_.reset();
  return wait_connected(cudaStreamPerThread); // until the free is done
}

caf::error nccl_communicator::wait_connected(cudaStream_t stream) const noexcept {
  for (;;) {
    const auto code = cudaStreamQuery(stream);
    if (code != cudaErrorNotReady)
      return check(code, "cudaStreamQuery", device());
    if (unwanted_->load(std::memory_order_relaxed))
      return no_throw([&] { return build_called_off(); });
    std::this_thread::yield();
  }
}

caf::error nccl_communicator::warm_up_collectives(std::byte* scratch,
                                                  cudaStream_t stream) noexcept {
  const auto n = static_cast<std::size_t>(size_);
  const auto rank = static_cast<std::size_t>(rank_);
  for (const auto bytes : warm_up_sizes) {
    const auto count = bytes / sizeof(float);
    const auto part_count = std::max<std::size_t>(1, count / n);
    const auto part_bytes = part_count * sizeof(float);
    auto* const mine = scratch + rank * part_bytes;
    for (const auto op : warm_up_ops) {
      if (auto err =
              outcome(ncclAllReduce(scratch, scratch, count, ncclFloat32, op, native(), stream),
                      "ncclAllReduce"))
        return err;
      if (auto err = outcome(
              ncclReduceScatter(scratch, mine, part_count, ncclFloat32, op, native(), stream),
              "ncclReduceScatter"))
        return err;
    }
    if (auto err =
            outcome(ncclReduce(scratch, scratch, count, ncclFloat32, ncclSum, 0, native(), stream),
                    "ncclReduce"))
      return err;
    if (auto err = outcome(ncclBroadcast(scratch, scratch, bytes, ncclUint8, 0, native(), stream),
                           "ncclBroadcast"))
      return err;
    if (auto err = outcome(ncclAllGather(mine, scratch, part_bytes, ncclUint8, native(), stream),
                           "ncclAllGather"))
      return err;
  }
  return {};
}

caf::error nccl_communicator::warm_up_groups(std::byte* scratch, cudaStream_t stream) noexcept {
  auto* const mine = scratch + static_cast<std::size_t>(rank_) * sizeof(float);
  auto group_of = [&](const char* api, auto call) {
    caf::error first;
    group_scope group;
    if (auto err = outcome(group.begun(), "ncclGroupStart"))
      return err;
    for (int i = 0; i < warm_up_group && !first; ++i)
      first = outcome(call(), api);
    const auto ended = group.end();
    return first ? first : outcome(ended, "ncclGroupEnd");
  };
  if (auto err = group_of("ncclAllReduce", [&] {
        return ncclAllReduce(scratch, scratch, 1, ncclFloat32, ncclSum, native(), stream);
      }))
    return err;
  if (auto err = group_of("ncclReduceScatter", [&] {
        return ncclReduceScatter(scratch, mine, 1, ncclFloat32, ncclSum, native(), stream);
      }))
    return err;
  return group_of("ncclAllGather", [&] {
    return ncclAllGather(mine, scratch, sizeof(float), ncclUint8, native(), stream);
  });
}

caf::error nccl_communicator::warm_up_pairs(std::byte* scratch, cudaStream_t stream) noexcept {
  caf::error first;
  group_scope group;
  if (auto err = outcome(group.begun(), "ncclGroupStart"))
    return err;
  for (int peer = 0; peer < size_ && !first; ++peer) {
    if (peer == rank_)
      continue;
    auto* const received = scratch + pair_bytes * (1 + static_cast<std::size_t>(peer));
    first = issue_send(scratch, pair_bytes, peer, stream);
    if (!first)
      first = issue_recv(received, pair_bytes, peer, stream);
  }
  const auto ended = group.end();
  return first ? first : outcome(ended, "ncclGroupEnd");
}

} // namespace troupe::detail
