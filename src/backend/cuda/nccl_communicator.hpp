/// NCCL communicators.
#pragma once

#include "backend/cuda/cuda_error.hpp"
#include "backend/cuda/cuda_functions.hpp"
#include "backend/cuda/cuda_handles.hpp"
#include "backend/cuda/device_pool.hpp"
#include "backend/cuda/driver_access.hpp"
#include <troupe/backend.hpp>

#include <driver_types.h>
#include <nccl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace troupe::detail {

ncclDataType_t to_nccl(dtype type) noexcept;
ncclRedOp_t to_nccl(reduce_op op) noexcept;

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

using shared_flag = std::shared_ptr<const std::atomic<bool>>;

class nccl_communicator final : public backend_communicator {
public:
  /// Makes a rank that has no NCCL handle yet.
  /// @shape float8: whether float8 types can be reduced; own: `own_bytes` of zeros, for barriers;
  ///        scratch: for `connect`; unwanted: true once the communicator is called off
  nccl_communicator(const local_rank& where, int size, bool float8, unique_stream_memory own,
                    unique_stream_memory scratch, shared_driver_access driver,
                    shared_flag unwanted) noexcept
      : driver_(std::move(driver)), unwanted_(std::move(unwanted)), own_(std::move(own)),
        scratch_(std::move(scratch)), handle_(nullptr, where.device), rank_(where.rank),
        size_(size), float8_(float8) {}
  /// Aborts what is left of NCCL's handles, if the driver may still be called.
  ~nccl_communicator() override;

  void adopt(ncclComm_t handle) noexcept { handle_ = unique_communicator{handle, device()}; }

  /// @source NCCL 2.28.9: each algorithm (src/group.cc) and each pair of ranks that exchange
  ///         messages (`p2pTaskAppend` in src/enqueue.cc) is connected at its first use
  caf::error connect(stream_view stream, connect_scope what) noexcept override;
  /// Sends and recvs match in their order, independent of other calls in the group. A send to the
  /// own rank needs its recv in the same group.
  /// @errors errc::not_supported: a float8 reduction on a device before Hopper
  caf::error enqueue(std::span<const collective_call> calls, stream_view stream) noexcept override;
  /// Windows belong to a second communicator over the same ranks, which the first call makes. NCCL
  /// uses a symmetric kernel if all of a rank's memory lies in windows, regardless of its peers.
  /// Kernels that differ between ranks hang for good.
  /// @errors errc::not_supported: no peer access between all devices
  /// @source NCCL 2.28.9, `ncclMakeSymmetricTaskList` (src/scheduler/symmetric_sched.cc)
  caf::error register_window(void* memory, std::size_t size_bytes,
                             stream_view stream) noexcept override;
  caf::error deregister_window(void* memory) noexcept override;
  caf::error asynchronous_error() noexcept override;

  /// Deregisters all windows; no work may use them. The caller then takes their communicator by
  /// `release_windows` and ends it.
  caf::error close_windows() noexcept;
  [[nodiscard]] ncclComm_t release_windows() noexcept { return window_handle_.release(); }
  /// Frees the scratch memory; called after that communicator has ended.
  void free_window_scratch() noexcept { window_scratch_.reset(); }

  int device() const noexcept { return handle_.device(); }
  int rank() const noexcept { return rank_; }
  ncclComm_t native() const noexcept { return handle_.get(); }
  const driver_access& driver() const noexcept { return *driver_; }
  /// Releases ownership: the caller ends the communicator.
  [[nodiscard]] ncclComm_t release() noexcept { return handle_.release(); }

private:
  caf::error warm_up_collectives(std::byte* scratch, cudaStream_t stream) noexcept;
  caf::error warm_up_groups(std::byte* scratch, cudaStream_t stream) noexcept;
  caf::error warm_up_pairs(std::byte* scratch, cudaStream_t stream) noexcept;

  caf::error open_windows(stream_view stream) noexcept;
  caf::error warm_up_windows(cudaStream_t stream) noexcept;
  caf::error add_window(void* memory, std::size_t size_bytes) noexcept;
  /// Returns the communicator for a call.
  ncclComm_t native(const collective_call& call) const noexcept {
    return call.symmetric ? window_handle_.get() : native();
  }

  caf::error validate(std::span<const collective_call> calls, stream_view stream) const;
  /// Returns the reason why a call is invalid, or null.
  const char* complaint(const collective_call& call) const noexcept;
  const char* complaint(const exchange_plan& plan, const collective_call& call) const noexcept;
  bool has_own_pairs(std::span<const collective_call> calls) const noexcept;

  /// Returns whether a call needs several NCCL calls.
  bool is_exchange(const collective_call& call) const noexcept;
  caf::error issue(const collective_call& call, cudaStream_t stream) noexcept;
  caf::error issue_group(std::span<const collective_call> calls, cudaStream_t stream) noexcept;
  caf::error issue_exchange(const collective_call& call, cudaStream_t stream) noexcept;
  caf::error issue_send(const void* memory, std::size_t bytes, int peer,
                        cudaStream_t stream) noexcept;
  caf::error issue_recv(void* memory, std::size_t bytes, int peer, cudaStream_t stream) noexcept;
  /// Passes NCCL's operation for a call to `f`, which issues the call.
  template <class F> caf::error with_operation(const collective_call& call, F f) noexcept;

  /// Issues calls of a communicator with one rank: each is a copy or a multiplication.
  caf::error issue_alone(std::span<const collective_call> calls, cudaStream_t stream) noexcept;
  caf::error copy(void* to, const void* from, std::size_t bytes, cudaStream_t stream) noexcept;

  /// Returns the failure of a call that gave `code`, or none. Waits while it is ncclInProgress.
  caf::error outcome(ncclResult_t code, const char* api) noexcept;

  /// Waits for the work in the stream. Fails if the communicator is called off.
  caf::error wait_connected(cudaStream_t stream) const noexcept;

  const shared_driver_access driver_;
  const shared_flag unwanted_;
  unique_stream_memory own_;     ///< outlives the work of `handle_`, as the scratch does
  unique_stream_memory scratch_; ///< until everything is connected
  unique_communicator handle_;
  bool collectives_connected_ = false;
  unique_symmetric_memory window_scratch_;
  unique_communicator window_handle_; ///< for windows; null before the first one
  std::vector<std::pair<void*, ncclWindow_t>> windows_;
  const int rank_;
  const int size_;
  const bool float8_;
};

caf::expected<communicator_id> make_nccl_id() noexcept;

/// Implement `build`, `abort` and `destroy` of `backend`. Devices are 0 to `device_count` - 1.
caf::expected<communicator_ranks>
build_communicator(const communicator_id& id, int size, std::span<const local_rank> ranks,
                   int device_count, const shared_driver_access& driver, pool_trimmer& trimmer,
                   const shared_flag& unwanted) noexcept;
caf::error abort_communicator(communicator_ranks ranks) noexcept;
caf::error destroy_communicator(communicator_ranks ranks) noexcept;

} // namespace troupe::detail
