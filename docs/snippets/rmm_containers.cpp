// Containers of RMM in memory of a device.

#include "checks.hpp"
#include <troupe/rmm.hpp>
#include <troupe/troupe.hpp>

#include <caf/actor_system.hpp>

#include <cuda_runtime_api.h>

#include <rmm/device_uvector.hpp>

#include <cstddef>
#include <iostream>
#include <vector>

namespace {

/// Returns the number of wrong elements, or -1 if CUDA fails.
long use(const troupe::device& device, cudaStream_t stream) {
  std::vector<float> result(1000);
  // [resource]
  troupe::rmm_resource resource{device};
  rmm::device_uvector<float> x{1000, stream, resource};
  // [resource]
  if (cudaMemsetAsync(x.data(), 0, x.size() * sizeof(float), stream) != cudaSuccess ||
      cudaMemcpyAsync(result.data(), x.data(), x.size() * sizeof(float), cudaMemcpyDeviceToHost,
                      stream) != cudaSuccess ||
      cudaStreamSynchronize(stream) != cudaSuccess)
    return -1;
  long wrong = 0;
  for (auto element : result)
    wrong += element != 0.0f;
  return wrong;
}

} // namespace

int main(int argc, char** argv) {
  return snippets::run_with_devices(argc, argv, [](caf::actor_system& sys) {
    using snippets::check, snippets::must;
    const auto list = must(troupe::list_devices(sys));
    if (list.backend != "cuda") {
      std::cout << "RMM's containers need GPUs\n";
      return;
    }
    const auto device = must(troupe::device::open(sys, 0));
    const auto wrong = use(device, cudaStreamLegacy);
    std::cout << wrong << " wrong elements\n";
    check(wrong == 0, "elements");
  });
}
