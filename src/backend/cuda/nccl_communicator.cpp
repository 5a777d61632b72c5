#include "backend/cuda/nccl_communicator.hpp"

#include "backend/cuda/cuda_error.hpp"
#include "backend/cuda/cuda_event.hpp"
#include "backend/cuda/cuda_functions.hpp"
#include "backend/cuda/device_guard.hpp"
#include "backend/cuda/fill.hpp"
#include "backend/cuda/nccl_arguments.hpp"
#include "backend/cuda/nccl_group.hpp"
#include "backend/cuda/nccl_types.hpp"
#include "foundation/collective_rules.hpp"
#include "foundation/error_text.hpp"
#include <troupe/collective_kind.hpp>
#include <troupe/dtype.hpp>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace troupe::detail {

namespace {

const std::byte* part(const void* memory, std::size_t offset) noexcept {
  return static_cast<const std::byte*>(memory) + offset;
}
std::byte* part(void* memory, std::size_t offset) noexcept {
  return static_cast<std::byte*>(memory) + offset;
}

} // namespace

nccl_communicator::~nccl_communicator() {
  if (driver_->ended())
    abandon();
}

void nccl_communicator::abandon() noexcept {
  (void)handle_.release();
  (void)scratch_.release();
  (void)own_.release();
}

caf::error nccl_communicator::outcome(ncclResult_t code, const char* api) noexcept {
  return check(settle(native(), code), api, device(), rank_);
}

caf::error nccl_communicator::asynchronous_error() noexcept {
  if (auto err = driver_->check(device()))
    return err;
  ncclResult_t state = ncclSuccess;
  if (auto err =
          check(ncclCommGetAsyncError(native(), &state), "ncclCommGetAsyncError", device(), rank_))
    return err;
  return state == ncclInProgress ? caf::error{}
                                 : check(state, "ncclCommGetAsyncError", device(), rank_);
}

caf::error nccl_communicator::enqueue(std::span<const collective_call> calls, stream_view stream,
                                      step_position) noexcept {
  if (auto err = no_throw([&] {
        return call_validator{{rank_, device()}, size_, float8_}.validate(calls, stream);
      }))
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

bool nccl_communicator::is_exchange(const collective_call& call) const noexcept {
  return rules_of(call.what).pairwise && !is_message(call.what) &&
         (!has_root(call.what) || call.peer == rank_);
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
    return with_operation(call, "ncclAllReduce", [&](ncclRedOp_t op) {
      return ncclAllReduce(call.send, call.recv, call.count, to_nccl(call.type), op, native(),
                           stream);
    });
  case collective_kind::reduce:
    return with_operation(call, "ncclReduce", [&](ncclRedOp_t op) {
      return ncclReduce(call.send, call.recv, call.count, to_nccl(call.type), op, call.peer,
                        native(), stream);
    });
  case collective_kind::reduce_scatter:
    return with_operation(call, "ncclReduceScatter", [&](ncclRedOp_t op) {
      return ncclReduceScatter(call.send, call.recv, call.count, to_nccl(call.type), op, native(),
                               stream);
    });
  case collective_kind::broadcast:
    return outcome(
        ncclBroadcast(call.send, call.recv, bytes, ncclUint8, call.peer, native(), stream),
        "ncclBroadcast");
  case collective_kind::all_gather:
    return outcome(ncclAllGather(call.send, call.recv, bytes, ncclUint8, native(), stream),
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
  for (int peer = 0; peer < size_; ++peer) {
    const auto x = traffic_between(call, rank_, peer);
    if (auto err = issue_send(x.send, x.send_bytes, peer, stream))
      return err;
    if (auto err = issue_recv(x.recv, x.recv_bytes, peer, stream))
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
caf::error nccl_communicator::with_operation(const collective_call& call, const char* api,
                                             F f) noexcept {
  if (call.op != reduce_op::premul_sum)
    return outcome(f(to_nccl(call.op)), api);
  std::array<std::byte, 8> factor{}; // since the argument is not const
  std::memcpy(factor.data(), call.factor, size_of(call.type));
  ncclRedOp_t op{};
  if (auto err = outcome(ncclRedOpCreatePreMulSum(&op, factor.data(), to_nccl(call.type),
                                                  ncclScalarHostImmediate, native()),
                         "ncclRedOpCreatePreMulSum"))
    return err;
  auto err = outcome(f(op), api);
  // "An operator may be destroyed as soon as the last NCCL function which is given that operator
  // returns" (nccl.h), in a group as well.
  keep_first(err, outcome(ncclRedOpDestroy(op, native()), "ncclRedOpDestroy"));
  return err;
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
                    "cuLaunchKernel", device());
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

} // namespace troupe::detail
