/// The report on a flight record: which rank is behind, and in which operation.
#pragma once

#include "record.hpp"

#include <string>

namespace flight {

/// Returns the report as text: sentences and tables.
std::string report(const record& x);

} // namespace flight
