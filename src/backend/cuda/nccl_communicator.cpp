#include "backend/cuda/nccl_communicator.hpp"

#include "backend/cuda/cuda_error.hpp"
#include "backend/cuda/cuda_handles.hpp"
#include "backend/cuda/device_guard.hpp"
#include <troupe/backend.hpp>
#include <troupe/dtype.hpp>
#include <troupe/error.hpp>

#include <cuda_runtime_api.h>
#include <driver_types.h>
#include <nccl.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace troupe::detail {

namespace {

/// NCCL connects an algorithm (tree, ring, NVLink SHARP) when it first chooses it, and chooses by
/// size: these lie between all its choices. Sum can run in the switch, product never does.
/// @units bytes
constexpr std::size_t warm_up_sizes[] = {8,        64,       512,      4096,    32768,
                                         1u << 18, 1u << 21, 1u << 24, 1u << 26};
constexpr std::size_t scratch_bytes = warm_up_sizes[std::size(warm_up_sizes) - 1];
constexpr ncclRedOp_t warm_up_ops[] = {ncclSum, ncclProd};

/// @units bytes that each pair of ranks exchanges
constexpr std::size_t pair_bytes = 1024;

cudaStream_t native(stream_view stream) noexcept {
  return static_cast<cudaStream_t>(stream.native);
}

caf::error failed(errc code, std::string detail, const local_rank* where = nullptr) {
  failure x;
  x.code = code;
  x.detail = std::move(detail);
  if (where != nullptr) {
    x.rank = where->rank;
    x.device = where->device;
  }
  return make_error(std::move(x));
}

/// Waits for a call that NCCL goes on with in the background, as NCCL_COMM_BLOCKING=0 in the
/// environment makes all of them.
ncclResult_t settle(ncclComm_t communicator, ncclResult_t code) noexcept {
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

caf::error check_ranks(int size, std::span<const local_rank> ranks, int device_count) {
  if (size < 1 || ranks.empty() || ranks.size() > static_cast<std::size_t>(size))
    return failed(errc::invalid_argument, "a communicator of " + std::to_string(size) + " ranks, " +
                                              std::to_string(ranks.size()) + " of them here");
  for (auto i = ranks.begin(); i != ranks.end(); ++i) {
    if (i->rank < 0 || i->rank >= size)
      return failed(errc::invalid_argument, "a rank outside the communicator", &*i);
    if (i->device < 0 || i->device >= device_count)
      return failed(errc::invalid_argument, "a device that does not exist", &*i);
    for (auto j = ranks.begin(); j != i; ++j)
      if (i->rank == j->rank || i->device == j->device)
        return failed(errc::invalid_argument, "a rank or device that comes twice", &*i);
  }
  return {};
}

/// Whether NCCL reduces float8 on `device`.
/// @source NCCL 2.24 release notes; NCCL user guide, "ncclDataType_t": needs sm_90
caf::expected<bool> has_float8(int device) noexcept {
  int version = 0;
  if (auto err = check(ncclGetVersion(&version), "ncclGetVersion", device))
    return err;
  int major = 0;
  if (auto err = check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
                       "cudaDeviceGetAttribute", device))
    return err;
  return version >= NCCL_VERSION(2, 24, 0) && major >= 9;
}

/// The ranks as what they are; they are never another backend's.
nccl_communicator& as_nccl(const std::unique_ptr<backend_communicator>& rank) noexcept {
  return static_cast<nccl_communicator&>(*rank);
}

/// A group's end sets the device that was current before it: that one be of the communicator, since
/// on a new thread it is device 0, which would get a context.
void select_one(std::span<const std::unique_ptr<backend_communicator>> ranks) noexcept {
  if (!ranks.empty())
    (void)select_device(as_nccl(ranks.front()).device());
}

/// Memory for `connect`, taken by the builder: a rank that found none left when its peers are on
/// their way into NCCL would leave them there.
caf::expected<unique_stream_memory> make_scratch(int device) noexcept {
  void* memory = nullptr;
  if (auto err = check(cudaMallocAsync(&memory, scratch_bytes, cudaStreamPerThread),
                       "cudaMallocAsync", device))
    return err;
  unique_stream_memory scratch{{memory, cudaStreamPerThread}, device};
  if (auto err = check(cudaMemsetAsync(memory, 0, scratch_bytes, cudaStreamPerThread),
                       "cudaMemsetAsync", device))
    return err;
  if (auto err = check(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize", device))
    return err;
  return scratch;
}

/// A rank with all that it needs but NCCL's handle.
caf::expected<std::unique_ptr<nccl_communicator>> prepare(const local_rank& where, int size) {
  if (auto err = check(select_device(where.device), "cudaSetDevice", where.device))
    return err;
  auto float8 = has_float8(where.device);
  if (!float8)
    return float8.error();
  auto scratch = make_scratch(where.device);
  if (!scratch)
    return scratch.error();
  return std::make_unique<nccl_communicator>(where, size, *float8, std::move(*scratch));
}

/// Makes the handles in one group; after an error those that are not null are to be aborted.
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
    const auto [rank, device] = ranks[i];
    first = check(select_device(device), "cudaSetDevice", device);
    // A rank that cannot be makes the group fail at once; short of a rank, its end would wait for
    // it.
    const int valid = first ? -1 : rank;
    const auto code = ncclCommInitRankConfig(&handles[i], size, native_id, valid, &config);
    if (!first && code != ncclInProgress)
      first = check(code, "ncclCommInitRankConfig", device, rank);
  }
  // After a failed call it builds nothing and gives that failure again.
  const auto ended = group.end();
  if (!first && ended != ncclInProgress)
    first = check(ended, "ncclGroupEnd", -1);
  for (std::size_t i = 0; i < ranks.size() && !first && ended == ncclInProgress; ++i)
    first =
        check(settle(handles[i], ended), "ncclCommInitRankConfig", ranks[i].device, ranks[i].rank);
  return first;
}

/// Aborts all ranks in one group: NCCL frees nothing before the last of them is aborted.
/// @source NCCL user guide, "Aborting a communicator"
caf::error abort_all(std::span<const std::unique_ptr<backend_communicator>> ranks) noexcept {
  caf::error first;
  auto keep = [&first](caf::error err) {
    if (err && !first)
      first = std::move(err);
  };
  select_one(ranks);
  group_scope group;
  keep(check(group.begun(), "ncclGroupStart", -1));
  for (const auto& rank : ranks) {
    auto& x = as_nccl(rank);
    const int device = x.device();
    const auto code = ncclCommAbort(x.release());
    if (code != ncclInProgress)
      keep(check(code, "ncclCommAbort", device, x.rank()));
  }
  const auto ended = group.end();
  if (ended != ncclInProgress)
    keep(check(ended, "ncclGroupEnd", -1));
  return first;
}

} // namespace

std::string nccl_version_text(int version) {
  const int unit = version < 10000 ? 1000 : 10000; // as the macro NCCL_VERSION has it
  return std::to_string(version / unit) + '.' + std::to_string(version % unit / 100) + '.' +
         std::to_string(version % 100);
}

ncclDataType_t to_nccl(dtype type) noexcept {
  switch (type) {
  case dtype::int8:
    return ncclInt8;
  case dtype::uint8:
    return ncclUint8;
  case dtype::int32:
    return ncclInt32;
  case dtype::uint32:
    return ncclUint32;
  case dtype::int64:
    return ncclInt64;
  case dtype::uint64:
    return ncclUint64;
  case dtype::float16:
    return ncclFloat16;
  case dtype::bfloat16:
    return ncclBfloat16;
  case dtype::float32:
    return ncclFloat32;
  case dtype::float64:
    return ncclFloat64;
  case dtype::float8_e4m3:
    return ncclFloat8e4m3;
  case dtype::float8_e5m2:
    return ncclFloat8e5m2;
  }
  return ncclNumTypes; // NCCL refuses it
}

ncclRedOp_t to_nccl(reduce_op op) noexcept {
  switch (op) {
  case reduce_op::sum:
    return ncclSum;
  case reduce_op::prod:
    return ncclProd;
  case reduce_op::min:
    return ncclMin;
  case reduce_op::max:
    return ncclMax;
  case reduce_op::avg:
    return ncclAvg;
  case reduce_op::premul_sum:
    break; // one of its own for each call
  }
  return ncclNumOps; // NCCL refuses it
}

caf::error nccl_communicator::outcome(ncclResult_t code, const char* api) noexcept {
  return check(settle(native(), code), api, device(), rank_);
}

caf::error nccl_communicator::connect(stream_view stream) noexcept {
  if (size_ == 1)
    return {};
  if (auto err = check(select_device(device()), "cudaSetDevice", device()))
    return err;
  void* const memory = scratch_.release().pointer;
  if (memory == nullptr) // connected before
    return {};
  unique_stream_memory scratch{{memory, detail::native(stream)}, device()};
  if (auto err = enqueue_collectives(memory, detail::native(stream)))
    return err;
  if (auto err = enqueue_pairs(memory, detail::native(stream)))
    return err;
  scratch.reset(); // so that the synchronization gives it back to CUDA
  return check(cudaStreamSynchronize(detail::native(stream)), "cudaStreamSynchronize", device());
}

caf::error nccl_communicator::enqueue_collectives(void* scratch, cudaStream_t stream) noexcept {
  for (const auto op : warm_up_ops)
    for (const auto size : warm_up_sizes)
      if (auto err = outcome(ncclAllReduce(scratch, scratch, size / sizeof(float), ncclFloat32, op,
                                           native(), stream),
                             "ncclAllReduce"))
        return err;
  return {};
}

caf::error nccl_communicator::enqueue_pairs(void* scratch, cudaStream_t stream) noexcept {
  auto* const to_send = static_cast<std::byte*>(scratch);
  group_scope group;
  if (auto err = outcome(group.begun(), "ncclGroupStart"))
    return err;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_)
      continue;
    auto* const received = to_send + pair_bytes * (1 + static_cast<std::size_t>(peer));
    if (auto err =
            outcome(ncclSend(to_send, pair_bytes, ncclUint8, peer, native(), stream), "ncclSend"))
      return err;
    if (auto err =
            outcome(ncclRecv(received, pair_bytes, ncclUint8, peer, native(), stream), "ncclRecv"))
      return err;
  }
  return outcome(group.end(), "ncclGroupEnd");
}

caf::error nccl_communicator::enqueue(std::span<const collective_call> calls,
                                      stream_view stream) noexcept {
  const auto& [what, send, recv, count, type, op, peer, factor, plan] = calls.front();
  if (!float8_ && (type == dtype::float8_e4m3 || type == dtype::float8_e5m2))
    return no_throw([&] {
      const local_rank where{rank_, device()};
      return failed(errc::not_supported,
                    "float8 is reduced on devices of compute capability 9.0 and more, by NCCL 2.24 "
                    "and newer",
                    &where);
    });
  if (auto err = check(select_device(device()), "cudaSetDevice", device()))
    return err;
  // Of one rank every result is a copy; NCCL 2.28 refuses the average of float8 there.
  const auto how = size_ == 1 ? ncclSum : to_nccl(op);
  auto err = outcome(
      ncclAllReduce(send, recv, count, to_nccl(type), how, native(), detail::native(stream)),
      "ncclAllReduce");
  (void)cudaGetLastError(); // NCCL leaves cudaErrorNotReady there, which a user's launch would find
  return err;
}

caf::error nccl_communicator::asynchronous_error() noexcept {
  ncclResult_t state = ncclSuccess;
  if (auto err =
          check(ncclCommGetAsyncError(native(), &state), "ncclCommGetAsyncError", device(), rank_))
    return err;
  return state == ncclInProgress ? caf::error{}
                                 : check(state, "ncclCommGetAsyncError", device(), rank_);
}

caf::expected<communicator_id> make_nccl_id() noexcept {
  ncclUniqueId id{};
  static_assert(sizeof id.internal == sizeof(communicator_id::bytes));
  if (auto err = check(ncclGetUniqueId(&id), "ncclGetUniqueId", -1))
    return err;
  communicator_id result;
  std::memcpy(result.bytes.data(), id.internal, sizeof id.internal);
  return result;
}

caf::expected<communicator_ranks> build_communicator(const communicator_id& id, int size,
                                                     std::span<const local_rank> ranks,
                                                     int device_count) noexcept {
  return no_throw([&]() -> caf::expected<communicator_ranks> {
    if (auto err = check_ranks(size, ranks, device_count))
      return err;
    communicator_ranks result;
    for (const auto& where : ranks) {
      auto rank = prepare(where, size);
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
    (void)abort_all(result); // it was never whole: the first cause counts
    return first;
  });
}

caf::error abort_communicator(communicator_ranks ranks) noexcept { return abort_all(ranks); }

caf::error destroy_communicator(communicator_ranks ranks) noexcept {
  // Each rank's end waits for its peers': in a group all of this process end together.
  caf::error first;
  auto keep = [&first](caf::error err) {
    if (err && !first)
      first = std::move(err);
  };
  select_one(ranks);
  group_scope finalizing;
  keep(check(finalizing.begun(), "ncclGroupStart", -1));
  for (const auto& rank : ranks) {
    auto& x = as_nccl(rank);
    const auto code = ncclCommFinalize(x.native());
    if (code != ncclInProgress)
      keep(check(code, "ncclCommFinalize", x.device(), x.rank()));
  }
  const auto ended = finalizing.end();
  if (ended != ncclInProgress)
    keep(check(ended, "ncclGroupEnd", -1));
  for (const auto& rank : ranks)
    if (!first && ended == ncclInProgress) {
      auto& x = as_nccl(rank);
      keep(check(settle(x.native(), ended), "ncclCommFinalize", x.device(), x.rank()));
    }
  if (first) {
    (void)abort_all(ranks);
    return first;
  }
  group_scope destroying;
  keep(check(destroying.begun(), "ncclGroupStart", -1));
  for (const auto& rank : ranks) {
    auto& x = as_nccl(rank);
    const int device = x.device();
    keep(check(ncclCommDestroy(x.release()), "ncclCommDestroy", device, x.rank()));
  }
  keep(check(destroying.end(), "ncclGroupEnd", -1));
  return first;
}

} // namespace troupe::detail
