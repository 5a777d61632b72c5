/// Part of class `cuda_device`: work that is recorded and launched again.
#include "backend/cuda/cuda_device.hpp"
#include "backend/cuda/cuda_error.hpp"
#include "backend/cuda/cuda_functions.hpp"
#include "backend/cuda/device_guard.hpp"
#include "foundation/error_text.hpp"
#include <troupe/error.hpp>

#include <cuda_runtime_api.h>

#include <string>

namespace troupe::detail {

namespace {

cudaGraphExec_t native(graph_view graph) noexcept {
  return static_cast<cudaGraphExec_t>(graph.native);
}

caf::error cannot_be_recorded(int device, std::string why) {
  return make_error({.code = errc::not_supported, .detail = std::move(why), .device = device});
}

/// Returns the error of a call that makes a graph of what was recorded. A recording that another
/// thread has made invalid, or that had no memory, may succeed later.
caf::error unless_made(cudaError_t code, const char* api, int device) {
  auto why = check(code, api, device);
  if (!why || code_of(why) == errc::device_fault || code_of(why) == errc::out_of_memory ||
      code == cudaErrorStreamCaptureInvalidated)
    return why;
  return cannot_be_recorded(device, "the work cannot be a graph: " + describe(why));
}

/// Makes `to` of what `stream` has recorded.
caf::error end_recording(cudaStream_t stream, int device, cudaGraphExec_t& to) {
  cudaGraph_t graph = nullptr;
  auto why = unless_made(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture", device);
  if (!why)
    why = unless_made(cudaGraphInstantiateWithFlags(&to, graph, 0), "cudaGraphInstantiateWithFlags",
                      device);
  if (!why)
    why = check(cudaGraphUpload(to, stream), "cudaGraphUpload", device);
  if (graph != nullptr)
    keep_first(why, check(cudaGraphDestroy(graph), "cudaGraphDestroy", device));
  return why;
}

} // namespace

caf::error cuda_device::check_recorded(const char* what) const noexcept {
  if (!records_)
    return {};
  return no_throw([&] {
    return cannot_be_recorded(ordinal_, std::string{what} + " cannot be part of a graph");
  });
}

caf::expected<graph_view>
cuda_device::record_graph(stream_view stream, const std::function<caf::error()>& enqueue) noexcept {
  return no_throw([&]() -> caf::expected<graph_view> {
    if (auto err = select())
      return err;
    // Other threads may still make the calls that this thread must not make meanwhile.
    if (auto err = check(cudaStreamBeginCapture(native(stream), cudaStreamCaptureModeThreadLocal),
                         "cudaStreamBeginCapture", ordinal_))
      return err;
    records_ = true;
    auto why = no_throw([&] { return enqueue(); });
    records_ = false;
    cudaGraphExec_t result = nullptr;
    keep_first(why, end_recording(native(stream), ordinal_, result));
    if (!why)
      return graph_view{result};
    if (result != nullptr)
      keep_first(why, check(cudaGraphExecDestroy(result), "cudaGraphExecDestroy", ordinal_));
    return why;
  });
}

caf::error cuda_device::launch_graph(graph_view graph, stream_view stream) noexcept {
  if (auto err = select())
    return err;
  return check(cudaGraphLaunch(native(graph), native(stream)), "cudaGraphLaunch", ordinal_);
}

caf::error cuda_device::drop_graph(graph_view graph) noexcept {
  if (driver_->ended())
    return {}; // it goes when the process ends
  return call_with(ordinal_, "cudaGraphExecDestroy",
                   [&] { return cudaGraphExecDestroy(native(graph)); });
}

} // namespace troupe::detail
