/// Tests of links by copies of devices, each on a thread of its own that waits for the lanes.
#pragma once

#include "topology/topology_core.hpp"

#include <vector>

namespace troupe::detail {

/// Tests links for `verify_links`: takes them out or back in. Ends early when `request` completes.
/// @errors why not all links could be tested; the others were
caf::error verify_all(topology_core& topology, const topology_core::answer& request,
                      const std::vector<link_ends>& links);

/// The same for links that are trusted only then. A link that cannot be tested is taken out.
caf::error check_new(topology_core& topology, const topology_core::answer& request,
                     const std::vector<link_ends>& links);

/// Measures links for `measure_links`.
caf::error measure_all(topology_core& topology, const topology_core::answer& request,
                       const std::vector<link_ends>& links);

} // namespace troupe::detail
