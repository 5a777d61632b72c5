/// Builds, aborts and destroys NCCL communicators.
#include "backend/cuda/communicator_failure.hpp"
#include "backend/cuda/cuda_error.hpp"
#include "backend/cuda/cuda_functions.hpp"
#include "backend/cuda/cuda_handles.hpp"
#include "backend/cuda/device_guard.hpp"
#include "backend/cuda/device_pool.hpp"
#include "backend/cuda/driver_access.hpp"
#include "backend/cuda/nccl_communicator.hpp"
#include "backend/cuda/nccl_group.hpp"
#include "foundation/error_text.hpp"
#include <troupe/backend.hpp>
#include <troupe/error.hpp>

#include <cuda_runtime_api.h>
#include <driver_types.h>
#include <nccl.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace troupe::detail {

namespace {

/// @units bytes of a communicator's own memory
constexpr std::size_t own_bytes = 4096;

caf::error check_ranks(int size, std::span<const local_rank> ranks, int device_count) {
  if (size < 1 || ranks.empty() || ranks.size() > static_cast<std::size_t>(size))
    return communicator_failure(errc::invalid_argument,
                                "a communicator of " + std::to_string(size) + " ranks, " +
                                    std::to_string(ranks.size()) + " of them here");
  for (auto i = ranks.begin(); i != ranks.end(); ++i) {
    if (i->rank < 0 || i->rank >= size)
      return communicator_failure(errc::invalid_argument, "a rank is out of range", &*i);
    if (i->device < 0 || i->device >= device_count)
      return communicator_failure(errc::invalid_argument, "a device does not exist", &*i);
    for (auto j = ranks.begin(); j != i; ++j)
      if (i->rank == j->rank || i->device == j->device)
        return communicator_failure(errc::invalid_argument, "a rank or device is listed twice",
                                    &*i);
  }
  return {};
}

/// Returns whether NCCL reduces float8 on `device`.
/// @source NCCL user guide, "ncclDataType_t": needs sm_90
caf::expected<bool> has_float8(int device) noexcept {
  int major = 0;
  if (auto err = check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
                       "cudaDeviceGetAttribute", device))
    return err;
  return major >= 9;
}

/// Casts a rank to its own type. A rank of another backend never gets here.
nccl_communicator& as_nccl(const std::unique_ptr<backend_communicator>& rank) noexcept {
  return static_cast<nccl_communicator&>(*rank);
}

/// The end of a group restores the device that was current before it. On a new thread that is
/// device 0, which would get a context. So a device of the communicator is selected first.
void select_one(std::span<const std::unique_ptr<backend_communicator>> ranks) noexcept {
  if (!ranks.empty())
    (void)select_device(as_nccl(ranks.front()).device());
}

/// Returns whether there is no rank, or none may be called any more.
bool may_not_call(std::span<const std::unique_ptr<backend_communicator>> ranks) noexcept {
  return ranks.empty() || as_nccl(ranks.front()).driver().ended();
}

/// Allocates memory filled with zeros; none for 0 bytes.
caf::expected<unique_stream_memory> make_memory(int device, std::size_t bytes) noexcept {
  if (bytes == 0)
    return unique_stream_memory{};
  void* memory = nullptr;
  if (auto err =
          check(cudaMallocAsync(&memory, bytes, cudaStreamPerThread), "cudaMallocAsync", device))
    return err;
  unique_stream_memory owner{{memory, cudaStreamPerThread}, device};
  if (auto err =
          check(cudaMemsetAsync(memory, 0, bytes, cudaStreamPerThread), "cudaMemsetAsync", device))
    return err;
  if (auto err = check(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize", device))
    return err;
  return owner;
}

/// Makes a rank with everything except NCCL's handle.
caf::expected<std::unique_ptr<nccl_communicator>> prepare(const local_rank& where, int size,
                                                          const shared_driver_access& driver,
                                                          const shared_flag& unwanted) {
  if (auto err = driver->check(where.device))
    return err;
  if (auto err = check(select_device(where.device), "cudaSetDevice", where.device))
    return err;
  auto float8 = has_float8(where.device);
  if (!float8)
    return float8.error();
  // The memory for `connect` is allocated here, too. A rank that ran out of memory later would
  // leave its peers waiting in NCCL.
  auto own = make_memory(where.device, size == 1 ? 0 : own_bytes);
  if (!own)
    return own.error();
  auto scratch = make_memory(where.device, size == 1 ? 0 : connect_scratch_bytes);
  if (!scratch)
    return scratch.error();
  return std::make_unique<nccl_communicator>(where, size, *float8, std::move(*own),
                                             std::move(*scratch), driver, unwanted);
}

/// Returns errc::out_of_memory if a rank would run out of memory. One that does so while it
/// connects leaves its peers waiting in NCCL for good.
caf::error check_room(const local_rank& where, int size, pool_trimmer& trimmer) {
  const auto needed = needed_bytes(where.device, size) + connect_scratch_bytes;
  auto free_bytes = free_bytes_of(where.device);
  if (free_bytes < needed) {
    trimmer.trim_now(where.device); // NCCL cannot request it
    free_bytes = free_bytes_of(where.device);
  }
  if (free_bytes >= needed) // also true if it is unknown
    return {};
  return communicator_failure(errc::out_of_memory,
                              "NCCL needs " + std::to_string(needed >> 20) +
                                  " MiB on the device, and " + std::to_string(free_bytes >> 20) +
                                  " MiB are free",
                              &where);
}

/// Returns the failure of a group of calls for `ranks`. If memory ran out, it names the rank whose
/// device has the least free memory.
caf::error group_failure(ncclResult_t code, const char* api,
                         std::span<const local_rank> ranks) noexcept {
  std::size_t least = unknown_bytes;
  const local_rank* fullest = nullptr;
  for (const auto& x : ranks)
    if (const auto bytes = free_bytes_of(x.device); bytes < least) {
      least = bytes;
      fullest = &x;
    }
  if (fullest != nullptr)
    if (auto err = nccl_failure(code, api, fullest->device, fullest->rank);
        code_of(err) == errc::out_of_memory)
      return err;
  return nccl_failure(code, api, -1);
}

/// Makes the handles in one group. After an error the caller must abort the handles that are not
/// null.
caf::error init_all(const communicator_id& id, int size, std::span<const local_rank> ranks,
                    std::span<ncclComm_t> handles) noexcept {
  ncclUniqueId native_id{};
  std::memcpy(native_id.internal, id.bytes.data(), sizeof native_id.internal);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  caf::error first;
  group_scope group;
  if (auto err = check(group.begun(), "ncclGroupStart", -1))
    return err;
  for (std::size_t i = 0; i < ranks.size() && !first; ++i) {
    const auto rank = ranks[i].rank;
    const auto device = ranks[i].device;
    first = check(select_device(device), "cudaSetDevice", device);
    // After an error, an invalid rank makes the group fail at once. If the rank were left out, the
    // end of the group would wait for it.
    const int valid = first ? -1 : rank;
    const auto code = ncclCommInitRankConfig(&handles[i], size, native_id, valid, &config);
    if (!first && code != ncclInProgress)
      first = check(code, "ncclCommInitRankConfig", device, rank);
  }
  // After a failed call, the end of the group builds nothing and returns that failure again.
  const auto ended = group.end();
  if (!first && ended != ncclSuccess && ended != ncclInProgress)
    first = group_failure(ended, "ncclGroupEnd", ranks);
  for (std::size_t i = 0; i < ranks.size() && !first && ended == ncclInProgress; ++i)
    first =
        check(settle(handles[i], ended), "ncclCommInitRankConfig", ranks[i].device, ranks[i].rank);
  return first;
}

/// Calls `f` with each rank, in one group of NCCL calls; `f` returns the code of the NCCL function
/// `api`. Adds errors to `first`. Returns the result of the group.
template <class F>
ncclResult_t call_all(std::span<const std::unique_ptr<backend_communicator>> ranks, const char* api,
                      caf::error& first, F f) noexcept {
  select_one(ranks);
  group_scope group;
  keep_first(first, check(group.begun(), "ncclGroupStart", -1));
  for (const auto& rank : ranks) {
    auto& x = as_nccl(rank);
    const int device = x.device(); // `f` may end the rank
    if (const auto code = f(x); code != ncclInProgress)
      keep_first(first, check(code, api, device, x.rank()));
  }
  const auto ended = group.end();
  if (ended != ncclInProgress)
    keep_first(first, check(ended, "ncclGroupEnd", -1));
  return ended;
}

/// Same, for functions that NCCL may continue in the background: waits for their end.
void settle_all(std::span<const std::unique_ptr<backend_communicator>> ranks, const char* api,
                caf::error& first, ncclResult_t (*f)(ncclComm_t)) noexcept {
  const auto ended =
      call_all(ranks, api, first, [f](nccl_communicator& x) { return f(x.native()); });
  for (const auto& rank : ranks)
    if (auto& x = as_nccl(rank); ended == ncclInProgress)
      keep_first(first, check(settle(x.native(), ended), api, x.device(), x.rank()));
}

/// Stops NCCL's threads for these ranks, in one group, and waits for their end. Without this, each
/// frees its rank's buffers while `ncclCommAbort` or `ncclCommDestroy` unmaps them from the other
/// ranks of this process. Two `cuMemUnmap` of one allocation at once damage the driver's heap.
/// After an error it abandons the ranks: NCCL would wait for a thread that it has not stopped.
/// @source NCCL 2.28.9, `commRevokeAsync` and `commReclaim` (src/init.cc); measured with driver
///         580.159.04
caf::error stop_threads(std::span<const std::unique_ptr<backend_communicator>> ranks) noexcept {
  caf::error first;
  if (ranks.size() > 1) // a process maps the buffers of other processes by handles of its own
    settle_all(ranks, "ncclCommRevoke", first,
               [](ncclComm_t x) { return ncclCommRevoke(x, NCCL_REVOKE_DEFAULT); });
  if (first)
    for (const auto& rank : ranks)
      as_nccl(rank).abandon();
  return first;
}

/// Aborts all ranks in one group: NCCL frees nothing before the last of them is aborted.
/// @source NCCL user guide, "Aborting a communicator"
caf::error abort_all(std::span<const std::unique_ptr<backend_communicator>> ranks) noexcept {
  caf::error first;
  call_all(ranks, "ncclCommAbort", first,
           [](nccl_communicator& x) { return ncclCommAbort(x.release()); });
  return first;
}

} // namespace

caf::expected<communicator_id> make_nccl_id() noexcept {
  ncclUniqueId id{};
  static_assert(sizeof id.internal == sizeof(communicator_id::bytes));
  if (auto err = check(ncclGetUniqueId(&id), "ncclGetUniqueId", -1))
    return err;
  communicator_id result;
  std::memcpy(result.bytes.data(), id.internal, sizeof id.internal);
  return result;
}

caf::error check_build(int size, std::span<const local_rank> ranks, int device_count,
                       const shared_driver_access& driver, pool_trimmer& trimmer) noexcept {
  return no_throw([&]() -> caf::error {
    if (auto err = check_ranks(size, ranks, device_count))
      return err;
    for (const auto& where : ranks) {
      if (auto err = driver->check(where.device))
        return err;
      if (size == 1)
        continue;
      if (auto err = check_room(where, size, trimmer))
        return err;
    }
    return {};
  });
}

caf::expected<communicator_ranks>
build_communicator(const communicator_id& id, int size, std::span<const local_rank> ranks,
                   int device_count, const shared_driver_access& driver, pool_trimmer& trimmer,
                   const shared_flag& unwanted) noexcept {
  return no_throw([&]() -> caf::expected<communicator_ranks> {
    // Where other processes have ranks, all were asked before: one that refuses now would leave its
    // peers in NCCL.
    const bool whole = ranks.size() == static_cast<std::size_t>(size);
    if (auto err = whole ? check_build(size, ranks, device_count, driver, trimmer)
                         : check_ranks(size, ranks, device_count))
      return err;
    if (unwanted->load(std::memory_order_relaxed))
      return build_called_off();
    communicator_ranks result;
    for (const auto& where : ranks) {
      auto rank = prepare(where, size, driver, unwanted);
      if (!rank)
        return rank.error();
      result.push_back(std::move(*rank));
    }
    std::vector<ncclComm_t> handles(ranks.size(), nullptr);
    auto first = init_all(id, size, ranks, handles);
    for (std::size_t i = 0; i < handles.size(); ++i)
      as_nccl(result[i]).adopt(handles[i]);
    if (!first)
      return result;
    // Not complete: it has no threads to stop. The first error counts.
    if (!may_not_call(result))
      (void)abort_all(result);
    return first;
  });
}

caf::error abort_communicator(communicator_ranks ranks) noexcept {
  if (may_not_call(ranks))
    return {};
  if (auto err = stop_threads(ranks))
    return err;
  return abort_all(ranks);
}

caf::error destroy_communicator(communicator_ranks ranks) noexcept {
  if (may_not_call(ranks))
    return {};
  caf::error first;
  if (as_nccl(ranks.front()).size() == static_cast<int>(ranks.size())) {
    if (auto err = stop_threads(ranks))
      return err;
  } else {
    // Waits for the ranks of other processes, which may still read buffers of these ranks.
    settle_all(ranks, "ncclCommFinalize", first, [](ncclComm_t x) { return ncclCommFinalize(x); });
    if (first) {
      (void)abort_all(ranks);
      return first;
    }
  }
  call_all(ranks, "ncclCommDestroy", first,
           [](nccl_communicator& x) { return ncclCommDestroy(x.release()); });
  return first;
}

} // namespace troupe::detail
