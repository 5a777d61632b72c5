/// Device memory of one generation, and what gives it back to the driver.
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

/// A pool of CUDA's, which keeps what is freed until it is trimmed. Its device's thread allocates
/// and frees; other threads trim it meanwhile.
///
/// To trim neither waits for the device nor for its thread: CUDA unmaps memory in which no
/// allocation is. It does so for a free only when the host has waited behind it (measured: a query
/// that says "done" is not enough), so that frees are waited for when they are done, by events.
/// The pool is trimmed in steps, between which calls of other threads to the driver come through.
class device_pool {
public:
  /// Makes the pool of a device, which is the current one.
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

  /// Memory was freed in the order of `stream`.
  /// @thread the device's
  void note_freed(cudaStream_t stream) noexcept;
  /// `stream` is about to be destroyed.
  /// @thread the device's
  void forget(cudaStream_t stream) noexcept;

  /// Gives back what no allocation has needed since the last call, or, of `all`, what none needs
  /// now. True: more is to be given back later.
  /// @thread the trimmer's: its current device changes
  bool trim_idle(bool all) noexcept;
  /// Gives back all that is not allocated. Waits for streams that have frees before them, but not
  /// long: behind a collective that hangs it would hold up the caller for good.
  /// @thread any that has a current device
  caf::error trim_all() noexcept;

  /// Destroys the pool; no work uses its memory.
  /// @thread the device's
  cudaError_t destroy() noexcept;
  /// The pool goes with the process: CUDA is not called any more.
  /// @thread the device's
  void abandon() noexcept;

private:
  caf::expected<bool> trim_to_need(bool all) noexcept;
  caf::error trim_to(std::uint64_t bytes) noexcept;
  caf::expected<std::uint64_t> attribute(cudaMemPoolAttr which) const noexcept;
  /// Lets CUDA see which frees are done. True: some are not. Under `mutex_`.
  bool has_unfinished_frees() noexcept;
  /// Records events behind the frees of each stream. False: some could not be.
  bool record_behind_frees() noexcept;

  std::mutex mutex_; ///< of the next two, and one trim at a time
  unique_memory_pool pool_;
  std::vector<unique_event> behind_frees_;
  const std::shared_ptr<pool_trimmer> trimmer_;
  std::mutex freed_mutex_; ///< of the next two; held for a few instructions, or to record events
  std::vector<cudaStream_t> freed_in_;
  bool freed_ = false; ///< since the last `trim_idle`
  std::atomic<bool> abandoned_{false};
};

/// Trims the pools of a backend, on a thread of its own: a lane whose device is idle is not woken
/// for it, and one that is busy is not held up.
class pool_trimmer {
public:
  /// @shape keep: 0: at once; `cuda_backend_options::forever`: only when memory runs out
  pool_trimmer(std::chrono::milliseconds keep, shared_driver_access driver);
  ~pool_trimmer();
  pool_trimmer(const pool_trimmer&) = delete;
  pool_trimmer& operator=(const pool_trimmer&) = delete;

  void add(const std::shared_ptr<device_pool>& pool);
  void remove(const device_pool& pool) noexcept;

  /// Memory was freed in one of the pools.
  /// @thread any
  void wake() noexcept;

  /// Gives back at once what the pools of a device, or of all devices, hold and nobody needs: an
  /// allocation found no memory.
  /// @shape  ordinal: -1 for all devices
  /// @thread any that has a current device
  void trim_now(int ordinal) noexcept;

private:
  struct state;

  const std::shared_ptr<state> state_; ///< also of its thread, which nothing waits for
};

} // namespace troupe::detail
