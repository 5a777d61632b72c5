/// The copies through troupe.
#pragma once

#include "copies.hpp"
#include <troupe/device.hpp>
#include <troupe/topology.hpp>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace bench {

/// A route whose buffers troupe knows.
struct route_refs {
  route way;
  troupe::any_gpu_ref source;
  troupe::any_gpu_ref target;
};

/// Memory of the devices' pools.
/// @shape devices: those of the routes
std::vector<route_refs> allocate_for(const std::vector<route>& routes,
                                     const std::vector<troupe::device>& devices,
                                     std::size_t size_bytes);

/// Takes `memory` over for as long as a ref to it lives.
/// @units size_bytes: of each buffer
std::vector<route_refs> adopt_for(const std::vector<route_memory>& memory,
                                  const std::vector<troupe::device>& devices,
                                  std::size_t size_bytes);

/// `topology::copy`, awaited on the client's thread: of one buffer, or of several in a request.
std::unique_ptr<copying_contestant> make_troupe_copies(std::string name,
                                                       const troupe::topology& links,
                                                       const std::vector<troupe::device>& devices,
                                                       std::vector<route_refs> memory);

} // namespace bench
