/// The device memory that NCCL needs while it builds and connects a communicator.
#pragma once

#include <cstddef>

namespace troupe::detail {

/// @units bytes of scratch memory on which `nccl_communicator::connect` works
inline constexpr std::size_t connect_scratch_bytes = 1u << 26;

/// Returns an upper bound for what NCCL allocates on a device for one communicator.
std::size_t needed_bytes(int device) noexcept;

} // namespace troupe::detail
