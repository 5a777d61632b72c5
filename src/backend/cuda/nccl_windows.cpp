#include "backend/cuda/nccl_windows.hpp"

#include "backend/cuda/communicator_failure.hpp"
#include "backend/cuda/cuda_error.hpp"
#include "backend/cuda/cuda_functions.hpp"
#include "backend/cuda/nccl_group.hpp"
#include "foundation/error_text.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>

namespace troupe::detail {

namespace {

/// @units bytes of scratch memory on which symmetric kernels run once, before the first user call
constexpr std::size_t window_scratch_bytes = 65536;

} // namespace

caf::error nccl_windows::open(ncclComm_t parent, cudaStream_t stream) noexcept {
  // Allocate first, since this can fail on one rank alone: its peers would wait for it in NCCL.
  void* memory = nullptr;
  if (auto err = check(ncclMemAlloc(&memory, window_scratch_bytes), "ncclMemAlloc", where_.device,
                       where_.rank))
    return err;
  scratch_ = unique_symmetric_memory{memory, where_.device};
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  ncclComm_t handle = nullptr;
  if (auto err = check(settle(parent, ncclCommSplit(parent, 0, where_.rank, &handle, &config)),
                       "ncclCommSplit", where_.device, where_.rank))
    return err;
  handle_ = unique_communicator{handle, where_.device};
  if (auto err = add(memory, window_scratch_bytes))
    return err;
  if (auto err = warm_up(stream))
    return err;
  return check(cudaStreamSynchronize(stream), "cudaStreamSynchronize", where_.device);
}

caf::error nccl_windows::warm_up(cudaStream_t stream) noexcept {
  auto* const scratch = static_cast<std::byte*>(scratch_.get());
  const auto n = static_cast<std::size_t>(size_);
  auto* const windows = handle_.get();
  const auto done = [&](ncclResult_t code, const char* api) {
    return check(settle(windows, code), api, where_.device, where_.rank);
  };
  for (auto bytes = sizeof(float); bytes <= window_scratch_bytes; bytes *= 8) {
    const auto count = bytes / sizeof(float);
    const auto part_count = std::max<std::size_t>(1, count / n);
    auto* const mine = scratch + static_cast<std::size_t>(where_.rank) * part_count * sizeof(float);
    if (auto err =
            done(ncclAllReduce(scratch, scratch, count, ncclFloat32, ncclSum, windows, stream),
                 "ncclAllReduce"))
      return err;
    if (auto err = done(ncclAllGather(mine, scratch, part_count, ncclFloat32, windows, stream),
                        "ncclAllGather"))
      return err;
    if (auto err = done(
            ncclReduceScatter(scratch, mine, part_count, ncclFloat32, ncclSum, windows, stream),
            "ncclReduceScatter"))
      return err;
  }
  return {};
}

caf::error nccl_windows::add(void* memory, std::size_t size_bytes) noexcept {
  ncclWindow_t window = nullptr;
  const auto code =
      ncclCommWindowRegister(handle_.get(), memory, size_bytes, &window, NCCL_WIN_COLL_SYMMETRIC);
  if (auto err =
          check(settle(handle_.get(), code), "ncclCommWindowRegister", where_.device, where_.rank))
    return err;
  return no_throw([&]() -> caf::error {
    if (window == nullptr)
      return communicator_failure(errc::not_supported,
                                  "NCCL has no symmetric windows over these devices", &where_);
    windows_.emplace_back(memory, window);
    return {};
  });
}

caf::error nccl_windows::remove(void* memory) noexcept {
  const auto i = std::ranges::find(windows_, memory, &std::pair<void*, ncclWindow_t>::first);
  if (i == windows_.end())
    return no_throw([&] {
      return communicator_failure(errc::invalid_argument,
                                  "the memory is not a window of this communicator", &where_);
    });
  const auto window = i->second;
  windows_.erase(i);
  return check(ncclCommWindowDeregister(handle_.get(), window), "ncclCommWindowDeregister",
               where_.device, where_.rank);
}

caf::error nccl_windows::deregister_all() noexcept {
  caf::error first;
  // In the order of registration, as on all ranks.
  for (const auto& [memory, window] : windows_)
    keep_first(first, check(ncclCommWindowDeregister(handle_.get(), window),
                            "ncclCommWindowDeregister", where_.device, where_.rank));
  windows_.clear();
  return first;
}

} // namespace troupe::detail
