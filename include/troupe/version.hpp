#pragma once

#define TROUPE_VERSION_MAJOR 0
#define TROUPE_VERSION_MINOR 1
#define TROUPE_VERSION_PATCH 0

namespace troupe {

/// The version of these headers, as "major.minor.patch".
inline constexpr const char* version_string = "0.1.0";

} // namespace troupe
