// Memory of a device for code that takes a memory resource of libcu++.

#include "checks.hpp"
#include <troupe/cuda_resource.hpp>
#include <troupe/troupe.hpp>

#include <caf/actor_system.hpp>

#include <cstddef>
#include <iostream>

namespace {

/// Allocates and frees, as a container does.
std::size_t use(troupe::device device, cudaStream_t stream) {
  const auto before = device.stats().wait();
  // [resource]
  troupe::cuda_resource resource{device};
  void* memory = resource.allocate(cuda::stream_ref{stream}, 1 << 20);
  // ... work in any stream
  const auto during = device.stats().wait();
  resource.deallocate(cuda::stream_ref{stream}, memory, 1 << 20); // behind the work in `stream`
  // [resource]
  return before && during ? before->free_bytes - during->free_bytes : 0;
}

} // namespace

int main(int argc, char** argv) {
  return snippets::run_with_devices(argc, argv, [](caf::actor_system& sys) {
    using snippets::must;
    const auto device = must(troupe::device::open(sys, 0));
    std::cout << use(device, nullptr) << " bytes of the device\n";
  });
}
