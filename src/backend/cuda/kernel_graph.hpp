/// Kernels that are launched as graphs of one node. That takes the host half of the time of a plain
/// launch, and the kernel starts as much sooner.
#pragma once

#include "backend/cuda/cuda_handles.hpp"
#include "backend/cuda/driver_access.hpp"
#include "backend/cuda/kernel_image.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <list>
#include <utility>

namespace troupe::detail {

/// The graphs of one user's kernels, one for each kernel. CUDA runs launches of the same graph one
/// after the other, in whichever streams they are.
/// @thread one at a time
class kernel_graphs {
public:
  kernel_graphs(int device, shared_driver_access driver) noexcept
      : device_(device), driver_(std::move(driver)) {}
  ~kernel_graphs();
  kernel_graphs(const kernel_graphs&) = delete;
  kernel_graphs& operator=(const kernel_graphs&) = delete;

  /// As `troupe::detail::launch`, on the device of this object, which is the current one. The first
  /// launch of a kernel makes its graph. The stream is not being captured.
  cudaError_t launch(const kernel& which, dim3 blocks, unsigned threads, void** arguments,
                     cudaStream_t stream);

private:
  struct graph_of {
    const kernel* which;
    unique_graph graph;
    unique_graph_exec exec;
    CUgraphNode node;
  };

  cudaError_t make(graph_of& x, const CUDA_KERNEL_NODE_PARAMS& node) const noexcept;

  const int device_;
  const shared_driver_access driver_;
  std::list<graph_of> graphs_; ///< the last one that was launched comes first
};

} // namespace troupe::detail
