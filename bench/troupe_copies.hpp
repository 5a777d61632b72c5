/// The copies with troupe.
#pragma once

#include "copies.hpp"
#include <troupe/device.hpp>
#include <troupe/topology.hpp>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace bench {

/// A route whose buffers are known to troupe.
struct route_refs {
  route way;
  troupe::any_gpu_ref source;
  troupe::any_gpu_ref target;
};

/// Allocates in the memory pools of the devices.
/// @shape devices: the devices of the routes
std::vector<route_refs> allocate_for(const std::vector<route>& routes,
                                     const std::vector<troupe::device>& devices,
                                     std::size_t size_bytes);

/// Adopts `memory` for as long as a reference to it exists.
/// @units size_bytes: of each buffer
std::vector<route_refs> adopt_for(const std::vector<route_memory>& memory,
                                  const std::vector<troupe::device>& devices,
                                  std::size_t size_bytes);

/// Makes a contestant that waits for `topology::copy` on the client's thread; one request has one
/// buffer or several.
std::unique_ptr<copying_contestant> make_troupe_copies(std::string name,
                                                       const troupe::topology& links,
                                                       const std::vector<troupe::device>& devices,
                                                       std::vector<route_refs> memory);

} // namespace bench
