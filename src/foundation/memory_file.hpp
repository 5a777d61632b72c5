/// Files in memory, which processes share.
#pragma once

#include "foundation/file_descriptor.hpp"

#include <cstddef>

namespace troupe::detail {

/// Makes a file of zeros that has no name in any file system, and whose size cannot change.
/// @errors errc::invalid_argument: no size, or one that no file can have; errc::unavailable: no
///         memory, or no more descriptors
caf::expected<file_descriptor> make_memory_file(std::size_t size_bytes);

/// Returns an error for a size that such a file cannot have.
caf::error check_memory_file_size(std::size_t size_bytes);

/// Seals against a change of the size (`F_GET_SEALS`).
extern const int memory_file_seals;

} // namespace troupe::detail
