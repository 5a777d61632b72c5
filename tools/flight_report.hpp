/// Who is behind, and in what.
#pragma once

#include "record.hpp"

#include <string>

namespace flight {

/// Sentences and tables for a reader.
std::string report(const record& x);

} // namespace flight
