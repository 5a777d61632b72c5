/// The memory pool of a device's generation, and the thread that returns unused memory to the
/// driver.
#pragma once

#include "backend/cuda/cuda_handles.hpp"
#include "backend/cuda/driver_access.hpp"
#include <troupe/error.hpp>

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace troupe::detail {

class pool_trimmer;

/// Makes a memory pool of device `ordinal` that keeps freed memory until it is trimmed. Without
/// that, CUDA returns memory at each synchronization.
caf::expected<unique_memory_pool> make_memory_pool(int ordinal) noexcept;

/// Returns whether device `from` can access the memory of device `to`; each can access its own.
caf::expected<bool> can_access(int from, int to) noexcept;

/// Returns the other devices that can access the memory of `device`.
caf::expected<std::vector<int>> peers_of(int device);

/// Lets the devices in `peers` access a pool of device `ordinal`.
caf::error grant_access(cudaMemPool_t pool, int ordinal, std::span<const int> peers) noexcept;

/// A CUDA memory pool that keeps freed memory until it is trimmed. The device's thread allocates
/// and frees; other threads may trim at the same time.
///
/// Trimming waits neither for the device nor for its thread: CUDA unmaps memory that holds no
/// allocation. CUDA does so for a free only after the host has waited behind it (measured: a query
/// that returns success is not enough). So events are recorded behind frees, and the host waits for
/// each event once it is done. Trimming runs in steps, so that driver calls of other threads run in
/// between.
class device_pool {
public:
  /// Creates the pool of device `ordinal`, which is the current device.
  static caf::expected<std::shared_ptr<device_pool>>
  create(int ordinal, std::shared_ptr<pool_trimmer> trimmer) noexcept;

  device_pool(cudaMemPool_t native, int ordinal, std::shared_ptr<pool_trimmer> trimmer) noexcept;
  ~device_pool();
  device_pool(const device_pool&) = delete;
  device_pool& operator=(const device_pool&) = delete;

  cudaMemPool_t native() const noexcept { return pool_.get(); }
  int ordinal() const noexcept { return pool_.device(); }

  /// Lets the devices in `peers` access its memory.
  caf::error grant(std::span<const int> peers) noexcept;

  /// Notes that memory was freed in the order of `stream`.
  /// @thread the device's
  void note_freed(cudaStream_t stream) noexcept;
  /// Forgets `stream`, which is about to be destroyed.
  /// @thread the device's
  void forget(cudaStream_t stream) noexcept;

  /// Returns to the driver the memory that no allocation has needed since the last call; with
  /// `all`, the memory that none needs now. Returns true if more must be returned later.
  /// @thread the trimmer's; changes its current device
  bool trim_idle(bool all) noexcept;
  /// Returns all unallocated memory to the driver. Waits for streams with pending frees, but only
  /// for a short time: behind a collective that hangs, it would block the caller for good.
  /// @thread any that has a current device
  caf::error trim_all() noexcept;

  /// Destroys the pool. No work may use its memory.
  /// @thread the device's
  cudaError_t destroy() noexcept;
  /// Drops the pool without a CUDA call; it ends with the process.
  /// @thread the device's
  void abandon() noexcept;

private:
  caf::expected<bool> trim_to_need(bool all) noexcept;
  caf::error trim_to(std::uint64_t bytes) noexcept;
  caf::expected<std::uint64_t> attribute(cudaMemPoolAttr which) const noexcept;
  /// Lets CUDA see which frees are done. Returns true if some are not. Needs `mutex_`.
  bool has_unfinished_frees() noexcept;
  /// Records an event behind the frees of each stream. Returns false if one could not be made.
  bool record_behind_frees() noexcept;

  std::mutex mutex_; ///< guards the next two members; allows one trim at a time
  unique_memory_pool pool_;
  std::vector<unique_event> behind_frees_;
  const std::shared_ptr<pool_trimmer> trimmer_;
  std::mutex freed_mutex_; ///< guards the next two members; held for a few instructions, or to
                           ///< record events
  std::vector<cudaStream_t> freed_in_;
  bool freed_ = false; ///< since the last `trim_idle`
  std::atomic<bool> abandoned_{false};
};

/// Trims the pools of a backend on its own thread, so that an idle lane is not woken and a busy
/// lane is not delayed.
class pool_trimmer {
public:
  /// @shape keep: how long; 0: not at all; `cuda_backend_options::forever`: until memory runs out
  pool_trimmer(std::chrono::milliseconds keep, shared_driver_access driver);
  ~pool_trimmer();
  pool_trimmer(const pool_trimmer&) = delete;
  pool_trimmer& operator=(const pool_trimmer&) = delete;

  void add(const std::shared_ptr<device_pool>& pool);
  void remove(const device_pool& pool) noexcept;

  /// Notes that memory was freed in one of the pools.
  /// @thread any
  void wake() noexcept;

  /// Returns all unused memory of the pools of one device, or of all, to the driver at once. Called
  /// when an allocation found no memory.
  /// @shape  ordinal: -1 for all devices
  /// @thread any that has a current device
  void trim_now(int ordinal) noexcept;

private:
  struct state;

  const std::shared_ptr<state> state_; ///< shared with the thread, which is never joined
};

} // namespace troupe::detail
