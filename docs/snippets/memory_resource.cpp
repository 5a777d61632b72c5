// Memory of a device for code that takes a memory resource of libcu++.

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
  auto device = troupe::device::open(sys, 0);
  if (!device)
    return fail(device.error());
  std::cout << use(*device, nullptr) << " bytes of the device\n";
}
