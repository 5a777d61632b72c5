/// Kernels that are launched again without the library that launched them first.
#pragma once

#include <troupe/error.hpp>

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>

namespace troupe::detail {

/// The launch of one kernel with its arguments.
/// @thread one
class kernel_replay {
public:
  virtual ~kernel_replay() = default;
  /// Launches the kernel again with the same arguments, on the current device.
  virtual cudaError_t launch(cudaStream_t stream) const noexcept = 0;
};

/// Calls `enqueue`, which puts work into `stream`, and keeps the work instead of running it.
/// Returns null if the work is anything else than one kernel. Meanwhile CUDA refuses to synchronize
/// the device, in all threads.
/// @source CUDA driver API, "Graph Management": the arguments of a kernel node belong to the graph
std::unique_ptr<const kernel_replay> capture_kernel(cudaStream_t stream,
                                                    const std::function<caf::error()>& enqueue);

} // namespace troupe::detail
