#include "backend/cuda/nccl_communicator.hpp"

#include "backend/cuda/cuda_error.hpp"
#include "backend/cuda/cuda_functions.hpp"
#include "backend/cuda/cuda_handles.hpp"
#include "backend/cuda/device_guard.hpp"
#include "backend/cuda/fill.hpp"
#include <troupe/backend.hpp>
#include <troupe/collective_kind.hpp>
#include <troupe/dtype.hpp>
#include <troupe/error.hpp>

#include <cuda_runtime_api.h>
#include <driver_types.h>
#include <nccl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace troupe::detail {

namespace {

/// NCCL connects an algorithm (tree, ring, NVLink SHARP, ...) at its first use, and chooses it by
/// kind, operation and size. These sizes cover all its choices. A sum can run in the switch, a
/// product never does.
/// @units bytes of the larger one of a rank's buffers
constexpr std::size_t warm_up_sizes[] = {8,        64,       512,      4096,    32768,
                                         1u << 18, 1u << 21, 1u << 24, 1u << 26};
constexpr std::size_t scratch_bytes = warm_up_sizes[std::size(warm_up_sizes) - 1];
constexpr ncclRedOp_t warm_up_ops[] = {ncclSum, ncclProd};

/// The more collectives a group has per channel (up to 64 channels), the less NCCL prefers the
/// ring. Such groups use algorithms that a single collective never uses.
/// @source NCCL 2.28.9, `ncclTopoGetAlgoTime` (src/graph/tuning.cc)
constexpr int warm_up_group = 256;

/// @units bytes that each pair of ranks exchanges
constexpr std::size_t pair_bytes = 1024;

/// @units bytes of scratch memory on which symmetric kernels run once, before the first user call
constexpr std::size_t window_scratch_bytes = 65536;

/// @units bytes of device memory; an upper bound for one communicator with all its connections
constexpr std::size_t build_bytes = std::size_t{576} << 20;

/// @units bytes; the same for the first one of the process on a device, with what NCCL loads there
constexpr std::size_t first_build_bytes = std::size_t{1} << 30;

/// @units bytes of a communicator's own memory
constexpr std::size_t own_bytes = 4096;

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

caf::error not_wanted() {
  return failed(errc::unavailable, "the build of the communicator was called off");
}

/// Waits for a call that NCCL continues in the background. With NCCL_COMM_BLOCKING=0 in the
/// environment, all calls do so.
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
      return failed(errc::invalid_argument, "a rank is out of range", &*i);
    if (i->device < 0 || i->device >= device_count)
      return failed(errc::invalid_argument, "a device does not exist", &*i);
    for (auto j = ranks.begin(); j != i; ++j)
      if (i->rank == j->rank || i->device == j->device)
        return failed(errc::invalid_argument, "a rank or device is listed twice", &*i);
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

bool may_not_call(std::span<const std::unique_ptr<backend_communicator>> ranks) noexcept {
  return !ranks.empty() && as_nccl(ranks.front()).driver().ended();
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
  auto scratch = make_memory(where.device, size == 1 ? 0 : scratch_bytes);
  if (!scratch)
    return scratch.error();
  return std::make_unique<nccl_communicator>(where, size, *float8, std::move(*own),
                                             std::move(*scratch), driver, unwanted);
}

/// One bit for each device on which NCCL has loaded what all communicators of the process share.
std::atomic<std::uint64_t> devices_of_nccl{0};

constexpr std::uint64_t bit_of(int device) noexcept { return std::uint64_t{1} << (device % 64); }

std::size_t needed_bytes(int device) noexcept {
  return (devices_of_nccl.load() & bit_of(device)) != 0 ? build_bytes : first_build_bytes;
}

/// Returns errc::out_of_memory if NCCL would run out of memory. A rank that does so while it
/// connects leaves its peers waiting in NCCL for good. So all ranks are checked before any begins.
caf::error check_room(const local_rank& where, int size) {
  if (size == 1)
    return {};
  const auto needed = needed_bytes(where.device);
  const auto free_bytes = free_bytes_of(where.device);
  if (free_bytes >= needed) // also true if it is unknown
    return {};
  return failed(errc::out_of_memory,
                "NCCL needs " + std::to_string(needed >> 20) + " MiB on the device, and " +
                    std::to_string(free_bytes >> 20) + " MiB are free",
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

/// Ends the communicators of the windows. No work runs on them, so an abort does the same as a
/// destroy, without waiting.
caf::error close_windows(std::span<const std::unique_ptr<backend_communicator>> ranks) noexcept {
  if (may_not_call(ranks))
    return {};
  caf::error first;
  auto keep = [&first](caf::error err) {
    if (err && !first)
      first = std::move(err);
  };
  for (const auto& rank : ranks)
    keep(as_nccl(rank).close_windows());
  select_one(ranks);
  group_scope group;
  keep(check(group.begun(), "ncclGroupStart", -1));
  for (const auto& rank : ranks) {
    auto& x = as_nccl(rank);
    const int device = x.device();
    if (auto* const handle = x.release_windows(); handle != nullptr)
      if (const auto code = ncclCommAbort(handle); code != ncclInProgress)
        keep(check(code, "ncclCommAbort", device, x.rank()));
  }
  if (const auto ended = group.end(); ended != ncclInProgress)
    keep(check(ended, "ncclGroupEnd", -1));
  for (const auto& rank : ranks)
    as_nccl(rank).free_window_scratch();
  return first;
}

/// Aborts all ranks in one group: NCCL frees nothing before the last of them is aborted.
/// @source NCCL user guide, "Aborting a communicator"
caf::error abort_all(std::span<const std::unique_ptr<backend_communicator>> ranks) noexcept {
  if (may_not_call(ranks))
    return {};
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
  keep(close_windows(ranks)); // now no kernel of the other communicator blocks the devices
  return first;
}

constexpr std::size_t no_limit = std::numeric_limits<std::size_t>::max();

bool is_float8(dtype type) noexcept {
  return type == dtype::float8_e4m3 || type == dtype::float8_e5m2;
}

bool is_operation(reduce_op op) noexcept {
  return op == reduce_op::premul_sum || to_nccl(op) != ncclNumOps;
}

bool any(const std::vector<std::size_t>& counts) noexcept {
  return std::ranges::any_of(counts, [](std::size_t x) { return x > 0; });
}

/// Returns whether a call has nothing to do.
bool is_empty(const collective_call& call) noexcept {
  switch (call.what) {
  case collective_kind::barrier:
    return false;
  case collective_kind::all_to_all_v:
    return !any(call.plan->send_counts) && !any(call.plan->recv_counts);
  default:
    return call.count == 0;
  }
}

std::size_t bytes_of(const collective_call& call) noexcept {
  return call.count * size_of(call.type);
}

bool is_aligned(const void* memory, dtype type) noexcept {
  return reinterpret_cast<std::uintptr_t>(memory) % size_of(type) == 0;
}

const std::byte* part(const void* memory, std::size_t offset) noexcept {
  return static_cast<const std::byte*>(memory) + offset;
}
std::byte* part(void* memory, std::size_t offset) noexcept {
  return static_cast<std::byte*>(memory) + offset;
}

} // namespace

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
    break; // created for each call
  }
  return ncclNumOps; // NCCL refuses it
}

nccl_communicator::~nccl_communicator() {
  if (driver_->ended()) { // all of it is freed when the process ends
    (void)handle_.release();
    (void)scratch_.release();
    (void)own_.release();
    (void)window_handle_.release();
    (void)window_scratch_.release();
  }
}

caf::error nccl_communicator::outcome(ncclResult_t code, const char* api) noexcept {
  return check(settle(native(), code), api, device(), rank_);
}

caf::error nccl_communicator::connect(stream_view stream, connect_scope what) noexcept {
  if (size_ == 1 || !scratch_) // nothing to connect, or all is connected
    return {};
  if (auto err = driver_->check(device()))
    return err;
  if (auto err = check(select_device(device()), "cudaSetDevice", device()))
    return err;
  auto* const memory = static_cast<std::byte*>(scratch_.get().pointer);
  const auto on = detail::native(stream);
  if (!collectives_connected_)
    if (auto err = warm_up_collectives(memory, on))
      return err;
  collectives_connected_ = true;
  devices_of_nccl.fetch_or(bit_of(device()));
  if (what == connect_scope::collectives)
    return wait_connected(on);
  if (auto err = warm_up_groups(memory, on))
    return err;
  if (auto err = warm_up_pairs(memory, on))
    return err;
  if (auto err = wait_connected(on))
    return err;
  // Not freed in `stream`: once a stream has used a pool, each of its events costs the host twice
  // the time. So do the events of all streams that wait for it, and each NCCL call has four.
  scratch_.reset();
  return wait_connected(cudaStreamPerThread); // until the free is done
}

caf::error nccl_communicator::wait_connected(cudaStream_t stream) const noexcept {
  for (;;) {
    const auto code = cudaStreamQuery(stream);
    if (code != cudaErrorNotReady)
      return check(code, "cudaStreamQuery", device());
    if (unwanted_->load(std::memory_order_relaxed))
      return no_throw([&] { return not_wanted(); });
    std::this_thread::yield();
  }
}

caf::error nccl_communicator::warm_up_collectives(std::byte* scratch,
                                                  cudaStream_t stream) noexcept {
  const auto n = static_cast<std::size_t>(size_);
  const auto rank = static_cast<std::size_t>(rank_);
  for (const auto bytes : warm_up_sizes) {
    const auto count = bytes / sizeof(float);
    const auto part_count = std::max<std::size_t>(1, count / n);
    const auto part_bytes = part_count * sizeof(float);
    auto* const mine = scratch + rank * part_bytes;
    for (const auto op : warm_up_ops) {
      if (auto err =
              outcome(ncclAllReduce(scratch, scratch, count, ncclFloat32, op, native(), stream),
                      "ncclAllReduce"))
        return err;
      if (auto err = outcome(
              ncclReduceScatter(scratch, mine, part_count, ncclFloat32, op, native(), stream),
              "ncclReduceScatter"))
        return err;
    }
    if (auto err =
            outcome(ncclReduce(scratch, scratch, count, ncclFloat32, ncclSum, 0, native(), stream),
                    "ncclReduce"))
      return err;
    if (auto err = outcome(ncclBroadcast(scratch, scratch, bytes, ncclUint8, 0, native(), stream),
                           "ncclBroadcast"))
      return err;
    if (auto err = outcome(ncclAllGather(mine, scratch, part_bytes, ncclUint8, native(), stream),
                           "ncclAllGather"))
      return err;
  }
  return {};
}

caf::error nccl_communicator::warm_up_groups(std::byte* scratch, cudaStream_t stream) noexcept {
  auto* const mine = scratch + static_cast<std::size_t>(rank_) * sizeof(float);
  auto group_of = [&](const char* api, auto call) {
    caf::error first;
    group_scope group;
    if (auto err = outcome(group.begun(), "ncclGroupStart"))
      return err;
    for (int i = 0; i < warm_up_group && !first; ++i)
      first = outcome(call(), api);
    const auto ended = group.end();
    return first ? first : outcome(ended, "ncclGroupEnd");
  };
  if (auto err = group_of("ncclAllReduce", [&] {
        return ncclAllReduce(scratch, scratch, 1, ncclFloat32, ncclSum, native(), stream);
      }))
    return err;
  if (auto err = group_of("ncclReduceScatter", [&] {
        return ncclReduceScatter(scratch, mine, 1, ncclFloat32, ncclSum, native(), stream);
      }))
    return err;
  return group_of("ncclAllGather", [&] {
    return ncclAllGather(mine, scratch, sizeof(float), ncclUint8, native(), stream);
  });
}

caf::error nccl_communicator::warm_up_pairs(std::byte* scratch, cudaStream_t stream) noexcept {
  caf::error first;
  group_scope group;
  if (auto err = outcome(group.begun(), "ncclGroupStart"))
    return err;
  for (int peer = 0; peer < size_ && !first; ++peer) {
    if (peer == rank_)
      continue;
    auto* const received = scratch + pair_bytes * (1 + static_cast<std::size_t>(peer));
    first = issue_send(scratch, pair_bytes, peer, stream);
    if (!first)
      first = issue_recv(received, pair_bytes, peer, stream);
  }
  const auto ended = group.end();
  return first ? first : outcome(ended, "ncclGroupEnd");
}

caf::error nccl_communicator::open_windows(stream_view stream) noexcept {
  // Allocate first, since this can fail on one rank alone: its peers would wait for it in NCCL.
  void* memory = nullptr;
  if (auto err =
          check(ncclMemAlloc(&memory, window_scratch_bytes), "ncclMemAlloc", device(), rank_))
    return err;
  window_scratch_ = unique_symmetric_memory{memory, device()};
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  ncclComm_t handle = nullptr;
  if (auto err = outcome(ncclCommSplit(native(), 0, rank_, &handle, &config), "ncclCommSplit"))
    return err;
  window_handle_ = unique_communicator{handle, device()};
  if (auto err = add_window(memory, window_scratch_bytes))
    return err;
  const auto on = detail::native(stream);
  if (auto err = warm_up_windows(on))
    return err;
  return check(cudaStreamSynchronize(on), "cudaStreamSynchronize", device());
}

caf::error nccl_communicator::warm_up_windows(cudaStream_t stream) noexcept {
  auto* const scratch = static_cast<std::byte*>(window_scratch_.get());
  const auto n = static_cast<std::size_t>(size_);
  auto* const windows = window_handle_.get();
  const auto done = [&](ncclResult_t code, const char* api) {
    return check(settle(windows, code), api, device(), rank_);
  };
  for (auto bytes = sizeof(float); bytes <= window_scratch_bytes; bytes *= 8) {
    const auto count = bytes / sizeof(float);
    const auto part_count = std::max<std::size_t>(1, count / n);
    auto* const mine = scratch + static_cast<std::size_t>(rank_) * part_count * sizeof(float);
    if (auto err =
            done(ncclAllReduce(scratch, scratch, count, ncclFloat32, ncclSum, windows, stream),
                 "ncclAllReduce"))
      return err;
    if (auto err = done(ncclAllGather(mine, scratch, part_count, ncclFloat32, windows, stream),
                        "ncclAllGather"))
      return err;
    if (auto err = done(
            ncclReduceScatter(scratch, mine, part_count, ncclFloat32, ncclSum, windows, stream),
            "ncclReduceScatter"))
      return err;
  }
  return {};
}

caf::error nccl_communicator::add_window(void* memory, std::size_t size_bytes) noexcept {
  ncclWindow_t window = nullptr;
  const auto code = ncclCommWindowRegister(window_handle_.get(), memory, size_bytes, &window,
                                           NCCL_WIN_COLL_SYMMETRIC);
  if (auto err =
          check(settle(window_handle_.get(), code), "ncclCommWindowRegister", device(), rank_))
    return err;
  return no_throw([&]() -> caf::error {
    if (window == nullptr) {
      const local_rank where{rank_, device()};
      return failed(errc::not_supported, "NCCL has no symmetric windows over these devices",
                    &where);
    }
    windows_.emplace_back(memory, window);
    return {};
  });
}

caf::error nccl_communicator::register_window(void* memory, std::size_t size_bytes,
                                              stream_view stream) noexcept {
  if (size_ == 1)
    return {};
  if (auto err = driver_->check(device()))
    return err;
  if (auto err = check(select_device(device()), "cudaSetDevice", device()))
    return err;
  if (!window_handle_)
    if (auto err = open_windows(stream))
      return err;
  return add_window(memory, size_bytes);
}

caf::error nccl_communicator::deregister_window(void* memory) noexcept {
  if (size_ == 1)
    return {};
  if (auto err = driver_->check(device()))
    return err;
  const auto i = std::ranges::find(windows_, memory, &std::pair<void*, ncclWindow_t>::first);
  if (i == windows_.end())
    return no_throw([&] {
      const local_rank where{rank_, device()};
      return failed(errc::invalid_argument, "the memory is not a window of this communicator",
                    &where);
    });
  const auto window = i->second;
  windows_.erase(i);
  return check(ncclCommWindowDeregister(window_handle_.get(), window), "ncclCommWindowDeregister",
               device(), rank_);
}

caf::error nccl_communicator::close_windows() noexcept {
  caf::error first;
  // In the order of registration, as on all ranks.
  for (const auto& [memory, window] : windows_)
    if (auto err = check(ncclCommWindowDeregister(window_handle_.get(), window),
                         "ncclCommWindowDeregister", device(), rank_);
        err && !first)
      first = std::move(err);
  windows_.clear();
  return first;
}

caf::error nccl_communicator::enqueue(std::span<const collective_call> calls,
                                      stream_view stream) noexcept {
  if (auto err = no_throw([&] { return validate(calls, stream); }))
    return err;
  if (std::ranges::all_of(calls, is_empty))
    return {};
  if (auto err = driver_->check(device()))
    return err;
  if (auto err = check(select_device(device()), "cudaSetDevice", device()))
    return err;
  const auto on = detail::native(stream);
  const bool single = calls.size() == 1 && !is_exchange(calls.front());
  auto err = size_ == 1 ? issue_alone(calls, on)
             : single   ? issue(calls.front(), on)
                        : issue_group(calls, on);
  (void)cudaGetLastError(); // else a user's launch would find NCCL's cudaErrorNotReady
  return err;
}

caf::error nccl_communicator::validate(std::span<const collective_call> calls,
                                       stream_view stream) const {
  const local_rank where{rank_, device()};
  if (calls.empty())
    return failed(errc::invalid_argument, "the group has no calls", &where);
  if (stream.native == nullptr)
    return failed(errc::invalid_argument, "no stream", &where);
  for (std::size_t i = 0; i < calls.size(); ++i)
    if (const char* why = complaint(calls[i])) {
      const auto which = calls.size() == 1 ? "" : "call " + std::to_string(i) + ": ";
      return failed(errc::invalid_argument, which + why, &where);
    }
  if (!has_own_pairs(calls))
    return failed(errc::invalid_argument,
                  "a send of a rank to itself needs its recv in the same group, with the same size",
                  &where);
  auto too_new = [this](const collective_call& call) {
    return !float8_ && reduces(call.what) && is_float8(call.type);
  };
  if (std::ranges::any_of(calls, too_new))
    return failed(errc::not_supported,
                  "reductions of float8 need devices of compute capability 9.0 or higher", &where);
  return {};
}

const char* nccl_communicator::complaint(const collective_call& call) const noexcept {
  const bool root = call.peer == rank_;
  bool sends = true;
  bool receives = true;
  switch (call.what) {
  case collective_kind::all_reduce:
  case collective_kind::all_gather:
  case collective_kind::reduce_scatter:
  case collective_kind::all_to_all:
  case collective_kind::all_to_all_v:
    break;
  case collective_kind::reduce:
  case collective_kind::gather:
    receives = root;
    break;
  case collective_kind::broadcast:
  case collective_kind::scatter:
    sends = root;
    break;
  case collective_kind::send:
    receives = false;
    break;
  case collective_kind::recv:
    sends = false;
    break;
  case collective_kind::barrier:
    return nullptr;
  default:
    return "unknown kind of collective";
  }
  if (!is_dtype(call.type))
    return "unknown dtype";
  if ((has_root(call.what) || is_message(call.what)) && (call.peer < 0 || call.peer >= size_))
    return "the peer or root is out of range";
  if (reduces(call.what) && !is_operation(call.op))
    return "unknown reduce operation";
  if (reduces(call.what) && call.op == reduce_op::premul_sum && call.factor == nullptr)
    return "no factor";
  if ((sends && !is_aligned(call.send, call.type)) ||
      (receives && !is_aligned(call.recv, call.type)))
    return "the memory is not aligned to its dtype";
  if (call.what == collective_kind::all_to_all_v)
    return call.plan == nullptr ? "no plan" : complaint(*call.plan, call);
  if (call.symmetric && size_ > 1 && !window_handle_)
    return "a symmetric call needs registered windows";
  if (call.count > no_limit / size_of(call.type) / static_cast<std::size_t>(size_))
    return "the size in bytes overflows";
  if (call.count > 0 && ((sends && call.send == nullptr) || (receives && call.recv == nullptr)))
    return "a buffer is null";
  return nullptr;
}

const char* nccl_communicator::complaint(const exchange_plan& plan,
                                         const collective_call& call) const noexcept {
  const auto n = static_cast<std::size_t>(size_);
  for (const auto* x :
       {&plan.send_counts, &plan.send_offsets, &plan.recv_counts, &plan.recv_offsets})
    if (x->size() != n)
      return "the plan does not have one entry per rank";
  const auto limit = no_limit / size_of(call.type);
  auto fits = [limit](std::size_t offset, std::size_t count) {
    return count <= limit && offset <= limit - count;
  };
  for (std::size_t i = 0; i < n; ++i)
    if (!fits(plan.send_offsets[i], plan.send_counts[i]) ||
        !fits(plan.recv_offsets[i], plan.recv_counts[i]))
      return "the size in bytes overflows";
  const auto rank = static_cast<std::size_t>(rank_);
  if (plan.send_counts[rank] != plan.recv_counts[rank])
    return "in the plan, a rank sends another count to itself than it receives from itself";
  if ((call.send == nullptr && any(plan.send_counts)) ||
      (call.recv == nullptr && any(plan.recv_counts)))
    return "a buffer is null";
  return nullptr;
}

bool nccl_communicator::has_own_pairs(std::span<const collective_call> calls) const noexcept {
  auto next = [&](collective_kind what, auto from) {
    return std::find_if(from, calls.end(), [&](const collective_call& x) {
      return x.what == what && x.peer == rank_ && x.count > 0;
    });
  };
  auto send = next(collective_kind::send, calls.begin());
  auto recv = next(collective_kind::recv, calls.begin());
  while (send != calls.end() && recv != calls.end() && bytes_of(*send) == bytes_of(*recv)) {
    send = next(collective_kind::send, send + 1);
    recv = next(collective_kind::recv, recv + 1);
  }
  return send == calls.end() && recv == calls.end();
}

bool nccl_communicator::is_exchange(const collective_call& call) const noexcept {
  switch (call.what) {
  case collective_kind::all_to_all:
  case collective_kind::all_to_all_v:
    return true;
  case collective_kind::gather:
  case collective_kind::scatter:
    return call.peer == rank_;
  default:
    return false;
  }
}

caf::error nccl_communicator::issue_group(std::span<const collective_call> calls,
                                          cudaStream_t stream) noexcept {
  caf::error first;
  group_scope group;
  if (auto err = outcome(group.begun(), "ncclGroupStart"))
    return err;
  // NCCL matches data between two ranks by order alone. All messages go first, so that a message
  // never meets a part of a collective.
  for (const bool messages : {true, false})
    for (const auto& call : calls)
      if (!first && is_message(call.what) == messages)
        first = issue(call, stream);
  const auto ended = group.end(); // after a failed call it issues nothing and returns that failure
  return first ? first : outcome(ended, "ncclGroupEnd");
}

caf::error nccl_communicator::issue(const collective_call& call, cudaStream_t stream) noexcept {
  if (is_empty(call))
    return {};
  // Data moves as bytes if nothing is computed, so every type works with every device and NCCL.
  const auto bytes = bytes_of(call);
  switch (call.what) {
  case collective_kind::all_reduce:
    return with_operation(call, [&](ncclRedOp_t op) {
      return outcome(ncclAllReduce(call.send, call.recv, call.count, to_nccl(call.type), op,
                                   native(call), stream),
                     "ncclAllReduce");
    });
  case collective_kind::reduce:
    return with_operation(call, [&](ncclRedOp_t op) {
      return outcome(ncclReduce(call.send, call.recv, call.count, to_nccl(call.type), op, call.peer,
                                native(), stream),
                     "ncclReduce");
    });
  case collective_kind::reduce_scatter:
    return with_operation(call, [&](ncclRedOp_t op) {
      return outcome(ncclReduceScatter(call.send, call.recv, call.count, to_nccl(call.type), op,
                                       native(call), stream),
                     "ncclReduceScatter");
    });
  case collective_kind::broadcast:
    return outcome(
        ncclBroadcast(call.send, call.recv, bytes, ncclUint8, call.peer, native(), stream),
        "ncclBroadcast");
  case collective_kind::all_gather:
    return outcome(ncclAllGather(call.send, call.recv, bytes, ncclUint8, native(call), stream),
                   "ncclAllGather");
  case collective_kind::barrier:
    return outcome(ncclAllReduce(own_.get().pointer, own_.get().pointer, 1, ncclUint8, ncclSum,
                                 native(), stream),
                   "ncclAllReduce");
  case collective_kind::send:
    return issue_send(call.send, bytes, call.peer, stream);
  case collective_kind::recv:
    return issue_recv(call.recv, bytes, call.peer, stream);
  case collective_kind::all_to_all:
  case collective_kind::all_to_all_v:
  case collective_kind::gather:
  case collective_kind::scatter:
    break;
  }
  return issue_exchange(call, stream);
}

caf::error nccl_communicator::issue_exchange(const collective_call& call,
                                             cudaStream_t stream) noexcept {
  const auto unit = size_of(call.type);
  const auto bytes = bytes_of(call);
  const bool root = call.peer == rank_;
  for (int peer = 0; peer < size_; ++peer) {
    const auto q = static_cast<std::size_t>(peer);
    const void* to_send = nullptr;
    void* to_receive = nullptr;
    std::size_t send_bytes = 0;
    std::size_t recv_bytes = 0;
    switch (call.what) {
    case collective_kind::all_to_all:
      to_send = part(call.send, q * bytes);
      to_receive = part(call.recv, q * bytes);
      send_bytes = recv_bytes = bytes;
      break;
    case collective_kind::all_to_all_v:
      send_bytes = call.plan->send_counts[q] * unit;
      recv_bytes = call.plan->recv_counts[q] * unit;
      if (send_bytes > 0)
        to_send = part(call.send, call.plan->send_offsets[q] * unit);
      if (recv_bytes > 0)
        to_receive = part(call.recv, call.plan->recv_offsets[q] * unit);
      break;
    case collective_kind::gather:
      if (peer == call.peer) {
        to_send = call.send;
        send_bytes = bytes;
      }
      if (root) {
        to_receive = part(call.recv, q * bytes);
        recv_bytes = bytes;
      }
      break;
    default: // scatter
      if (root) {
        to_send = part(call.send, q * bytes);
        send_bytes = bytes;
      }
      if (peer == call.peer) {
        to_receive = call.recv;
        recv_bytes = bytes;
      }
      break;
    }
    if (peer == rank_ && to_send == to_receive) // in place
      continue;
    if (auto err = issue_send(to_send, send_bytes, peer, stream))
      return err;
    if (auto err = issue_recv(to_receive, recv_bytes, peer, stream))
      return err;
  }
  return {};
}

caf::error nccl_communicator::issue_send(const void* memory, std::size_t bytes, int peer,
                                         cudaStream_t stream) noexcept {
  if (bytes == 0)
    return {};
  return outcome(ncclSend(memory, bytes, ncclUint8, peer, native(), stream), "ncclSend");
}

caf::error nccl_communicator::issue_recv(void* memory, std::size_t bytes, int peer,
                                         cudaStream_t stream) noexcept {
  if (bytes == 0)
    return {};
  return outcome(ncclRecv(memory, bytes, ncclUint8, peer, native(), stream), "ncclRecv");
}

template <class F>
caf::error nccl_communicator::with_operation(const collective_call& call, F f) noexcept {
  if (call.op != reduce_op::premul_sum)
    return f(to_nccl(call.op));
  std::array<std::byte, 8> factor{}; // since the argument is not const
  std::memcpy(factor.data(), call.factor, size_of(call.type));
  ncclRedOp_t op{};
  if (auto err = outcome(ncclRedOpCreatePreMulSum(&op, factor.data(), to_nccl(call.type),
                                                  ncclScalarHostImmediate, native()),
                         "ncclRedOpCreatePreMulSum"))
    return err;
  auto err = f(op);
  // "An operator may be destroyed as soon as the last NCCL function which is given that operator
  // returns" (nccl.h), in a group as well.
  auto destroyed = outcome(ncclRedOpDestroy(op, native()), "ncclRedOpDestroy");
  return err ? err : destroyed;
}

caf::error nccl_communicator::issue_alone(std::span<const collective_call> calls,
                                          cudaStream_t stream) noexcept {
  auto next_recv = calls.begin();
  for (const auto& call : calls) {
    if (is_empty(call))
      continue;
    caf::error err;
    switch (call.what) {
    case collective_kind::barrier:
    case collective_kind::recv: // done by its send
      break;
    case collective_kind::send:
      next_recv = std::find_if(next_recv, calls.end(), [](const collective_call& x) {
        return x.what == collective_kind::recv && x.count > 0;
      });
      err = copy(next_recv->recv, call.send, bytes_of(call), stream);
      ++next_recv;
      break;
    case collective_kind::all_to_all_v: {
      const auto& plan = *call.plan;
      const auto unit = size_of(call.type);
      err = copy(part(call.recv, plan.recv_offsets[0] * unit),
                 part(call.send, plan.send_offsets[0] * unit), plan.send_counts[0] * unit, stream);
      break;
    }
    default:
      if (reduces(call.what) && call.op == reduce_op::premul_sum)
        err = check(launch_multiply(call.recv, call.send, call.factor, call.count,
                                    to_nccl(call.type), stream),
                    "cudaLaunchKernel", device());
      else
        err = copy(call.recv, call.send, bytes_of(call), stream);
    }
    if (err)
      return err;
  }
  return {};
}

caf::error nccl_communicator::copy(void* to, const void* from, std::size_t bytes,
                                   cudaStream_t stream) noexcept {
  if (to == from)
    return {};
  return check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream),
               "cudaMemcpyAsync", device());
}

caf::error nccl_communicator::asynchronous_error() noexcept {
  if (auto err = driver_->check(device()))
    return err;
  for (auto* const handle : {native(), window_handle_.get()}) {
    ncclResult_t state = ncclSuccess;
    if (handle == nullptr)
      continue;
    if (auto err =
            check(ncclCommGetAsyncError(handle, &state), "ncclCommGetAsyncError", device(), rank_))
      return err;
    if (state == ncclInProgress)
      continue;
    if (auto err = check(state, "ncclCommGetAsyncError", device(), rank_))
      return err;
  }
  return {};
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

caf::expected<communicator_ranks>
build_communicator(const communicator_id& id, int size, std::span<const local_rank> ranks,
                   int device_count, const shared_driver_access& driver, pool_trimmer& trimmer,
                   const shared_flag& unwanted) noexcept {
  return no_throw([&]() -> caf::expected<communicator_ranks> {
    if (auto err = check_ranks(size, ranks, device_count))
      return err;
    if (unwanted->load(std::memory_order_relaxed))
      return not_wanted();
    communicator_ranks result;
    for (const auto& where : ranks) {
      if (auto err = driver->check(where.device))
        return err;
      if (size > 1 && free_bytes_of(where.device) < needed_bytes(where.device) + scratch_bytes)
        trimmer.trim_now(where.device); // NCCL cannot request it
      auto rank = prepare(where, size, driver, unwanted);
      if (!rank)
        return rank.error();
      if (auto err = check_room(where, size))
        return err;
      result.push_back(std::move(*rank));
    }
    std::vector<ncclComm_t> handles(ranks.size(), nullptr);
    auto first = init_all(id, size, ranks, handles);
    for (std::size_t i = 0; i < handles.size(); ++i)
      as_nccl(result[i]).adopt(handles[i]);
    if (!first)
      return result;
    (void)abort_all(result); // not complete yet: the first error counts
    return first;
  });
}

caf::error abort_communicator(communicator_ranks ranks) noexcept { return abort_all(ranks); }

caf::error destroy_communicator(communicator_ranks ranks) noexcept {
  if (may_not_call(ranks))
    return {};
  // The end of a rank waits for its peers. In a group, all ranks of this process end together.
  caf::error first;
  auto keep = [&first](caf::error err) {
    if (err && !first)
      first = std::move(err);
  };
  keep(close_windows(ranks));
  if (first) {
    (void)abort_all(ranks);
    return first;
  }
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
