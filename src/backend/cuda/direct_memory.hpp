/// Direct collectives: the memory of ranks, kept for the next communicators.
#pragma once

#include "backend/cuda/cuda_handles.hpp"
#include "backend/cuda/direct_layout.hpp"
#include "backend/cuda/driver_access.hpp"
#include <troupe/error.hpp>

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <utility>
#include <vector>

namespace troupe::detail {

/// Words in pinned memory by which the host and the kernels of one rank talk.
struct direct_words {
  /// The number of the last kernel that has ended, of all communicators that had the arena. Kernels
  /// have numbers, in the order of their launches.
  alignas(64) std::atomic<std::uint32_t> ended{0};
  alignas(64) std::atomic<std::uint32_t> aborted{0}; ///< not 0: the kernels are to end
  alignas(64) direct::mismatch found;                ///< written by a kernel before its end

  /// Makes the words ready for another communicator. The count of kernels goes on: events may still
  /// be bound to it.
  void begin_again() noexcept {
    aborted.store(0);
    found = {};
  }
};

/// The arena of one rank, filled with zeros, and its words.
struct direct_arena {
  int device = -1;
  unsigned ranks = 0; ///< for which there is room
  direct::arena* memory = nullptr;
  direct_words* words = nullptr;
  bool streams_wait_for_words = false; ///< the driver can do that on the device
};

/// Lends arenas. They are in memory that all devices with access to theirs can reach. Taking one
/// that was used before takes no time, and waits for no work on a device.
/// @thread any library thread: its current device may change
class direct_memory {
public:
  explicit direct_memory(shared_driver_access driver) noexcept : driver_(std::move(driver)) {}
  /// No arena may be lent any more.
  ~direct_memory();
  direct_memory(const direct_memory&) = delete;
  direct_memory& operator=(const direct_memory&) = delete;

  /// @errors errc::out_of_memory, and CUDA's
  caf::expected<direct_arena> take(int device, unsigned ranks) noexcept;
  /// Makes an arena of other memory, which has room for it.
  caf::expected<direct_arena> make_in(void* memory, int device, unsigned ranks) noexcept;
  /// Takes an arena back, whose kernels have ended on all ranks, and clears it. Of one that was
  /// made in other memory, the memory is not touched: kernels of other ranks may still use it.
  caf::error give_back(const direct_arena& x) noexcept;
  /// Returns `direct::plane::first` for a new communicator.
  std::uint32_t next_first() noexcept { return direct::first_number(communicators_.fetch_add(1)); }
  /// Returns an error if the device has a fault.
  caf::error fault_of(int device) noexcept;

private:
  struct device_memory {
    cudaStream_t stream = nullptr; ///< of this object
    unique_memory_pool pool;
    std::vector<direct_arena> free;
  };

  caf::expected<device_memory*> open(int device) noexcept;
  caf::expected<direct_arena> make(device_memory& on, int device, unsigned ranks) noexcept;
  /// Gives words to an arena, and clears it.
  caf::error begin(const device_memory& on, direct_arena& x) noexcept;
  caf::expected<direct_words*> take_words() noexcept;
  caf::error check_waits(const device_memory& on, direct_arena& x) noexcept;
  caf::error clear(const device_memory& on, const direct_arena& x) noexcept;

  const shared_driver_access driver_;
  std::atomic<std::uint32_t> communicators_{0};
  std::mutex mutex_;
  std::map<int, device_memory> devices_;
  std::vector<void*> pages_; ///< pinned
  std::vector<direct_words*> free_words_;
  std::set<const direct::arena*> in_other_memory_;
};

} // namespace troupe::detail
