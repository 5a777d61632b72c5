/// Groups of NCCL calls, and calls that NCCL continues in the background.
#pragma once

#include "backend/cuda/cuda_error.hpp"
#include "backend/cuda/cuda_functions.hpp"

#include <nccl.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <utility>

namespace troupe::detail {

/// Counts the groups of NCCL calls that this process has opened by `group_scope`. A group that
/// stays open would collect all later calls of its thread without running them.
class group_count {
public:
  static std::uint64_t begun() noexcept { return begun_.load(std::memory_order_relaxed); }
  static std::uint64_t ended() noexcept { return ended_.load(std::memory_order_relaxed); }
  /// Returns the number of open groups. Exact only while no other thread begins or ends one.
  static std::uint64_t open() noexcept { return begun() - ended(); }

private:
  friend class group_scope;
  static inline std::atomic<std::uint64_t> begun_{0};
  static inline std::atomic<std::uint64_t> ended_{0};
};

/// A group of NCCL calls of this thread; it is ended exactly once.
class group_scope {
public:
  group_scope() noexcept : code_(ncclGroupStart()), open_(code_ == ncclSuccess) {
    if (open_)
      group_count::begun_.fetch_add(1, std::memory_order_relaxed);
  }
  ~group_scope() {
    if (open_)
      teardown(end(), "ncclGroupEnd", -1);
  }

  group_scope(const group_scope&) = delete;
  group_scope& operator=(const group_scope&) = delete;

  /// Returns the result of ncclGroupStart. Without ncclSuccess there is no group.
  ncclResult_t begun() const noexcept { return code_; }

  /// Ends the group: NCCL runs its calls, or none of them if one has failed. Returns the result of
  /// ncclGroupEnd; later calls return it again.
  [[nodiscard]] ncclResult_t end() noexcept {
    if (std::exchange(open_, false)) {
      code_ = ncclGroupEnd();
      group_count::ended_.fetch_add(1, std::memory_order_relaxed);
    }
    return code_;
  }

private:
  ncclResult_t code_;
  bool open_;
};

/// Waits for a call that NCCL continues in the background. With NCCL_COMM_BLOCKING=0 in the
/// environment, all calls do so.
inline ncclResult_t settle(ncclComm_t communicator, ncclResult_t code) noexcept {
  while (code == ncclInProgress) {
    ncclResult_t state = ncclInProgress;
    if (const auto asked = ncclCommGetAsyncError(communicator, &state); asked != ncclSuccess)
      return asked;
    if (state == ncclInProgress)
      std::this_thread::yield();
    code = state;
  }
  return code;
}

} // namespace troupe::detail
