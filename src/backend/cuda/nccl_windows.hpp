/// The windows of one rank: memory that symmetric kernels use.
#pragma once

#include "backend/cuda/cuda_handles.hpp"
#include <troupe/backend.hpp>
#include <troupe/error.hpp>

#include <driver_types.h>
#include <nccl.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace troupe::detail {

/// Windows belong to a second communicator over the ranks of the first one. NCCL uses a symmetric
/// kernel if all of a rank's memory lies in windows, regardless of its peers. Kernels that differ
/// between ranks hang for good.
/// @source NCCL 2.28.9, `ncclMakeSymmetricTaskList` (src/scheduler/symmetric_sched.cc)
class nccl_windows {
public:
  /// @param size of the communicator
  nccl_windows(const local_rank& where, int size) noexcept : where_(where), size_(size) {}

  bool is_open() const noexcept { return static_cast<bool>(handle_); }
  /// Makes the second communicator from `parent`, on all ranks at the same time.
  caf::error open(ncclComm_t parent, cudaStream_t stream) noexcept;
  /// @errors errc::not_supported: no peer access between all devices
  caf::error add(void* memory, std::size_t size_bytes) noexcept;
  /// @errors errc::invalid_argument: the memory is no window
  caf::error remove(void* memory) noexcept;

  /// Returns the communicator for symmetric calls; null before `open`.
  ncclComm_t communicator() const noexcept { return handle_.get(); }

  /// Deregisters all windows; no work may use them. The caller then takes their communicator by
  /// `release` and ends it.
  caf::error deregister_all() noexcept;
  [[nodiscard]] ncclComm_t release() noexcept { return handle_.release(); }
  /// Frees the scratch memory; called after that communicator has ended.
  void free_scratch() noexcept { scratch_.reset(); }

  /// Gives up ownership of everything, for a driver that may not be called any more.
  void abandon() noexcept {
    (void)handle_.release();
    (void)scratch_.release();
  }

private:
  caf::error warm_up(cudaStream_t stream) noexcept;

  const local_rank where_;
  const int size_;
  unique_symmetric_memory scratch_;
  unique_communicator handle_;
  std::vector<std::pair<void*, ncclWindow_t>> windows_;
};

} // namespace troupe::detail
