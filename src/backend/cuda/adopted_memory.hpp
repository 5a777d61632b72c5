/// Memory that the user has allocated with CUDA.
#pragma once

#include <troupe/error.hpp>

#include <cstddef>

namespace troupe::detail {

/// Implements `backend::admit_memory`.
caf::error admit_memory(int device, void* memory, std::size_t size_bytes) noexcept;

} // namespace troupe::detail
