/// Memory that the user has allocated with CUDA.
#pragma once

#include <troupe/error.hpp>

namespace troupe::detail {

/// Implements `backend::admit_memory`. Calls only what needs no current device.
caf::error admit_memory(int device, void* memory) noexcept;

} // namespace troupe::detail
