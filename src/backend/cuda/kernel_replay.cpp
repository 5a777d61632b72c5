#include "backend/cuda/kernel_replay.hpp"

#include "backend/cuda/driver_functions.hpp"

#include <cuda.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace troupe::detail {

namespace {

class captured_kernel final : public kernel_replay {
public:
  captured_kernel() = default;
  ~captured_kernel() override {
    if (graph_ != nullptr)
      static_cast<void>(driver::destroy_graph(graph_)); // frees memory of the host
  }
  captured_kernel(const captured_kernel&) = delete;
  captured_kernel& operator=(const captured_kernel&) = delete;

  /// Takes what was captured. Returns false if the capture failed.
  bool end_capture(cudaStream_t stream) noexcept {
    return driver::end_capture(stream, &graph_) == cudaSuccess && graph_ != nullptr;
  }

  /// Reads how the graph launches its kernel. Returns false if it has anything else than one.
  bool read() {
    std::size_t nodes = 0;
    if (driver::get_nodes(graph_, nullptr, &nodes) != cudaSuccess || nodes != 1)
      return false;
    CUgraphNode node = nullptr;
    auto type = CU_GRAPH_NODE_TYPE_EMPTY;
    CUDA_KERNEL_NODE_PARAMS how{};
    if (driver::get_nodes(graph_, &node, &nodes) != cudaSuccess ||
        driver::get_type(node, &type) != cudaSuccess || type != CU_GRAPH_NODE_TYPE_KERNEL ||
        driver::get_kernel_parameters(node, &how) != cudaSuccess)
      return false;
    // The driver takes the handle of a kernel for that of its function in the current context.
    function_ = how.func != nullptr ? how.func : reinterpret_cast<CUfunction>(how.kern);
    arguments_ = how.kernelParams; // null if it was launched with the bytes of its arguments
    argument_bytes_ = how.extra;
    config_.gridDimX = how.gridDimX;
    config_.gridDimY = how.gridDimY;
    config_.gridDimZ = how.gridDimZ;
    config_.blockDimX = how.blockDimX;
    config_.blockDimY = how.blockDimY;
    config_.blockDimZ = how.blockDimZ;
    config_.sharedMemBytes = how.sharedMemBytes;
    const bool has_arguments = arguments_ != nullptr || argument_bytes_ != nullptr;
    return function_ != nullptr && has_arguments && read_attributes(node);
  }

  cudaError_t launch(cudaStream_t stream) const noexcept override {
    auto how = config_;
    how.hStream = stream;
    how.attrs = const_cast<CUlaunchAttribute*>(attributes_.data());
    how.numAttrs = static_cast<unsigned>(attributes_.size());
    return driver::launch_with(&how, function_, arguments_, argument_bytes_);
  }

private:
  /// Reads the attributes of a launch that decide how the kernel's blocks run.
  bool read_attributes(CUgraphNode node) {
    const auto add = [&](CUlaunchAttributeID which, auto is_set) {
      CUlaunchAttribute x{};
      x.id = which;
      if (driver::get_node_attribute(node, which, &x.value) != cudaSuccess)
        return false;
      if (is_set(x.value))
        attributes_.push_back(x);
      return true;
    };
    return add(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
               [](auto& x) { return x.clusterDim.x != 0; }) &&
           add(CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE,
               [](auto& x) {
                 return x.clusterSchedulingPolicyPreference != CU_CLUSTER_SCHEDULING_POLICY_DEFAULT;
               }) &&
           add(CU_LAUNCH_ATTRIBUTE_COOPERATIVE, [](auto& x) { return x.cooperative != 0; });
  }

  CUgraph graph_ = nullptr; // it has the arguments
  CUfunction function_ = nullptr;
  void** arguments_ = nullptr;
  void** argument_bytes_ = nullptr;
  CUlaunchConfig config_{};
  std::vector<CUlaunchAttribute> attributes_;
};

} // namespace

std::unique_ptr<const kernel_replay> capture_kernel(cudaStream_t stream,
                                                    const std::function<caf::error()>& enqueue) {
  auto result = std::make_unique<captured_kernel>();
  if (driver::begin_capture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) != cudaSuccess)
    return nullptr;
  caf::error error;
  try {
    error = enqueue();
  } catch (...) {
    static_cast<void>(result->end_capture(stream));
    throw;
  }
  const bool is_one = result->end_capture(stream) && !error && result->read();
  return is_one ? std::move(result) : nullptr;
}

} // namespace troupe::detail
