/// Tests of links, by copies that devices make over them. On a thread of their own, which waits for
/// the lanes.
#pragma once

#include "core/topology_core.hpp"

#include <vector>

namespace troupe::detail {

/// As `verify_links`; links are taken out, and come back. Ends early when `request` is answered.
/// @errors why not all could be tested; the others were
caf::error verify_all(topology_core& topology, const topology_core::answer& request,
                      const std::vector<link_ends>& links);

/// The same for links that are trusted only then; one that cannot be tested is taken out.
caf::error check_new(topology_core& topology, const topology_core::answer& request,
                     const std::vector<link_ends>& links);

/// As `measure_links`.
caf::error measure_all(topology_core& topology, const topology_core::answer& request,
                       const std::vector<link_ends>& links);

} // namespace troupe::detail
