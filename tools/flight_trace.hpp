/// Conversion of a record for trace viewers.
#pragma once

#include "record.hpp"

#include <string>

namespace flight {

/// Returns Trace Event JSON: a process for each world with a thread for each rank, and a process
/// for each device with a thread for each stream; one complete event for each part.
/// @source Trace Event Format, "JSON Object Format", "Complete Events", "Metadata Events"
std::string trace(const record& x);

} // namespace flight
