#include "backend/cuda/kernel_graph.hpp"

#include "backend/cuda/cuda_functions.hpp"
#include "backend/cuda/driver_functions.hpp"

#include <algorithm>

namespace troupe::detail {

kernel_graphs::~kernel_graphs() {
  if (driver_->ended()) // all of it is freed when the process ends
    for (auto& x : graphs_) {
      (void)x.exec.release();
      (void)x.graph.release();
    }
}

cudaError_t kernel_graphs::make(graph_of& x, const CUDA_KERNEL_NODE_PARAMS& node) const noexcept {
  cudaGraph_t graph = nullptr;
  if (const auto code = cudaGraphCreate(&graph, 0); code != cudaSuccess)
    return code;
  x.graph = {graph, device_};
  if (const auto code = driver::add_kernel_node(&x.node, graph, nullptr, 0, &node);
      code != cudaSuccess)
    return code;
  cudaGraphExec_t exec = nullptr;
  if (const auto code = driver::instantiate(&exec, graph, 0); code != cudaSuccess)
    return code;
  x.exec = {exec, device_};
  return cudaSuccess;
}

cudaError_t kernel_graphs::launch(const kernel& which, dim3 blocks, unsigned threads,
                                  void** arguments, cudaStream_t stream) {
  CUDA_KERNEL_NODE_PARAMS node{};
  node.kern = native(which);
  node.gridDimX = blocks.x;
  node.gridDimY = blocks.y;
  node.gridDimZ = blocks.z;
  node.blockDimX = threads;
  node.blockDimY = 1;
  node.blockDimZ = 1;
  node.kernelParams = arguments;
  const auto found = std::ranges::find(graphs_, &which, &graph_of::which);
  if (found == graphs_.end()) {
    graph_of made{.which = &which, .graph = {}, .exec = {}, .node = nullptr};
    if (const auto code = make(made, node); code != cudaSuccess)
      return code;
    graphs_.push_front(std::move(made));
  } else {
    graphs_.splice(graphs_.begin(), graphs_, found);
    auto& x = graphs_.front();
    if (const auto code = driver::set_kernel_node(x.exec.get(), x.node, &node); code != cudaSuccess)
      return code;
  }
  return driver::launch_graph(graphs_.front().exec.get(), stream);
}

} // namespace troupe::detail
