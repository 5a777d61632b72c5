// Containers of RMM in memory of a device.

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

int fail(const caf::error& why) {
  std::cerr << troupe::describe(why) << '\n';
  return 1;
}

} // namespace

int main(int argc, char** argv) {
  troupe::config cfg;
  if (auto error = cfg.parse(argc, argv))
    return fail(error);
  if (cfg.help_printed())
    return 0;
  caf::actor_system sys{cfg};
  auto list = troupe::list_devices(sys);
  if (!list)
    return fail(list.error());
  if (list->backend != "cuda") {
    std::cout << "RMM's containers need GPUs\n";
    return 0;
  }
  auto device = troupe::device::open(sys, 0);
  if (!device)
    return fail(device.error());
  const auto wrong = use(*device, cudaStreamLegacy);
  std::cout << wrong << " wrong elements\n";
  return wrong == 0 ? 0 : 1;
}
