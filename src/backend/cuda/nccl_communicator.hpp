/// NCCL's communicators.
#pragma once

#include "backend/cuda/cuda_handles.hpp"
#include <troupe/backend.hpp>

#include <nccl.h>

#include <cstddef>
#include <span>
#include <string>
#include <utility>

namespace troupe::detail {

/// The oldest NCCL that has every function in use.
inline constexpr int oldest_nccl = NCCL_VERSION(2, 18, 0);

/// "2.28.9" for 22809.
std::string nccl_version_text(int version);

ncclDataType_t to_nccl(dtype type) noexcept;
ncclRedOp_t to_nccl(reduce_op op) noexcept;

/// A group of NCCL calls of this thread; it is ended exactly once.
class group_scope {
public:
  group_scope() noexcept : code_(ncclGroupStart()), open_(code_ == ncclSuccess) {}
  ~group_scope() {
    if (open_)
      teardown(ncclGroupEnd(), "ncclGroupEnd", -1);
  }

  group_scope(const group_scope&) = delete;
  group_scope& operator=(const group_scope&) = delete;

  /// What ncclGroupStart gave; unless it is ncclSuccess there is no group.
  ncclResult_t begun() const noexcept { return code_; }

  /// Ends the group, which runs its calls; what ncclGroupEnd gave.
  [[nodiscard]] ncclResult_t end() noexcept {
    return std::exchange(open_, false) ? ncclGroupEnd() : code_;
  }

private:
  const ncclResult_t code_;
  bool open_;
};

class nccl_communicator final : public backend_communicator {
public:
  /// A rank without NCCL's handle yet.
  /// @shape float8: whether float8 types can be reduced; scratch: for `connect`
  nccl_communicator(const local_rank& where, int size, bool float8,
                    unique_stream_memory scratch) noexcept
      : handle_(nullptr, where.device), scratch_(std::move(scratch)), rank_(where.rank),
        size_(size), float8_(float8) {}

  void adopt(ncclComm_t handle) noexcept { handle_ = unique_communicator{handle, device()}; }

  caf::error connect(stream_view stream) noexcept override;
  /// @errors errc::not_supported too: float8 on a device before Hopper (nothing enqueued)
  caf::error enqueue(std::span<const collective_call> calls, stream_view stream) noexcept override;
  caf::error asynchronous_error() noexcept override;

  int device() const noexcept { return handle_.device(); }
  int rank() const noexcept { return rank_; }
  ncclComm_t native() const noexcept { return handle_.get(); }
  /// The caller ends the communicator.
  [[nodiscard]] ncclComm_t release() noexcept { return handle_.release(); }

private:
  caf::error enqueue_collectives(void* scratch, cudaStream_t stream) noexcept;
  caf::error enqueue_pairs(void* scratch, cudaStream_t stream) noexcept;
  /// The failure of a call that gave `code`; none if it is, or becomes, ncclSuccess.
  caf::error outcome(ncclResult_t code, const char* api) noexcept;

  unique_communicator handle_;
  unique_stream_memory scratch_; ///< until it is connected
  const int rank_;
  const int size_;
  const bool float8_;
};

caf::expected<communicator_id> make_nccl_id() noexcept;

/// The three of `backend`; devices are 0 to `device_count` - 1.
caf::expected<communicator_ranks> build_communicator(const communicator_id& id, int size,
                                                     std::span<const local_rank> ranks,
                                                     int device_count) noexcept;
caf::error abort_communicator(communicator_ranks ranks) noexcept;
caf::error destroy_communicator(communicator_ranks ranks) noexcept;

} // namespace troupe::detail
