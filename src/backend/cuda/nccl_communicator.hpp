/// NCCL communicators.
#pragma once

#include "backend/cuda/cuda_handles.hpp"
#include "backend/cuda/device_pool.hpp"
#include "backend/cuda/driver_access.hpp"
#include <troupe/backend.hpp>
#include <troupe/error.hpp>

#include <driver_types.h>
#include <nccl.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>

namespace troupe::detail {

using shared_flag = std::shared_ptr<const std::atomic<bool>>;

/// @units bytes of scratch memory on which `nccl_communicator::connect` works
inline constexpr std::size_t connect_scratch_bytes = 1u << 26;

/// Returns an upper bound for the memory of `device` that NCCL allocates for one communicator of
/// `size` ranks while it builds and connects it.
std::size_t needed_bytes(int device, int size) noexcept;

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
  /// Aborts NCCL's handle if it is left, and the driver may still be called.
  ~nccl_communicator() override;

  void adopt(ncclComm_t handle) noexcept { handle_ = unique_communicator{handle, device()}; }

  /// @source NCCL 2.28.9: each algorithm (src/group.cc) and each pair of ranks that exchange
  ///         messages (`p2pTaskAppend` in src/enqueue.cc) is connected at its first use
  caf::error connect(stream_view stream, connect_scope what) noexcept override;
  /// Sends and recvs match in their order, independent of other calls in the group. A send to the
  /// own rank needs its recv in the same group.
  /// @errors errc::not_supported: a float8 reduction on a device before Hopper
  caf::error enqueue(std::span<const collective_call> calls, stream_view stream,
                     step_position) noexcept override;
  caf::error asynchronous_error() noexcept override;

  int device() const noexcept { return handle_.device(); }
  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  ncclComm_t native() const noexcept { return handle_.get(); }
  const driver_access& driver() const noexcept { return *driver_; }
  /// Releases ownership: the caller ends the communicator.
  [[nodiscard]] ncclComm_t release() noexcept { return handle_.release(); }
  /// Gives up ownership of everything: it is freed when the process ends.
  void abandon() noexcept;

private:
  caf::error warm_up_collectives(std::byte* scratch, cudaStream_t stream) noexcept;
  caf::error warm_up_groups(std::byte* scratch, cudaStream_t stream) noexcept;
  caf::error warm_up_pairs(std::byte* scratch, cudaStream_t stream) noexcept;

  /// Returns whether a call needs several NCCL calls.
  bool is_exchange(const collective_call& call) const noexcept;
  caf::error issue(const collective_call& call, cudaStream_t stream) noexcept;
  caf::error issue_group(std::span<const collective_call> calls, cudaStream_t stream) noexcept;
  caf::error issue_exchange(const collective_call& call, cudaStream_t stream) noexcept;
  caf::error issue_send(const void* memory, std::size_t bytes, int peer,
                        cudaStream_t stream) noexcept;
  caf::error issue_recv(void* memory, std::size_t bytes, int peer, cudaStream_t stream) noexcept;
  /// Passes NCCL's operation for a call to `f`, which calls the function `api`.
  template <class F>
  caf::error with_operation(const collective_call& call, const char* api, F f) noexcept;

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
  const int rank_;
  const int size_;
  const bool float8_;
};

caf::expected<communicator_id> make_nccl_id() noexcept;

/// Implement `check_build`, `build`, `abort` and `destroy` of `backend`. Devices are 0 to
/// `device_count` - 1.
caf::error check_build(int size, std::span<const local_rank> ranks, int device_count,
                       const shared_driver_access& driver, pool_trimmer& trimmer) noexcept;
caf::expected<communicator_ranks>
build_communicator(const communicator_id& id, int size, std::span<const local_rank> ranks,
                   int device_count, const shared_driver_access& driver, pool_trimmer& trimmer,
                   const shared_flag& unwanted) noexcept;
caf::error abort_communicator(communicator_ranks ranks) noexcept;
caf::error destroy_communicator(communicator_ranks ranks) noexcept;

} // namespace troupe::detail
