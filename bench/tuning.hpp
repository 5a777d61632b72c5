/// A table of ways (`troupe::way_table`) from measured times.
#pragma once

#include "verb_report.hpp"

#include <string>

namespace bench {

/// Writes for each verb the largest block that goes direct: the largest measured size below the
/// first one that takes longer that way than by NCCL through troupe, as blocking calls of the
/// facade; or `all` if none takes longer. Ends the process if the file cannot be written, or if a
/// verb was not measured both ways.
void write_way_table(const std::string& file, const outcome& x);

} // namespace bench
