/// A record for a trace viewer.
#pragma once

#include "record.hpp"

#include <string>

namespace flight {

/// As Trace Event JSON: a process for each world with a thread for each rank, and one for each
/// device with a thread for each stream; one complete event for each part.
/// @source Trace Event Format, "JSON Object Format", "Complete Events", "Metadata Events"
std::string trace(const record& x);

} // namespace flight
