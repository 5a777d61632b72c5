/// Buffers that a user stream or another process has acquired. All functions are called under the
/// admission lock.
#pragma once

#include "operation/buffer.hpp"
#include <troupe/launch.hpp>

namespace troupe::detail {

inline bool reads(access_mode mode) noexcept { return mode != access_mode::write; }
inline bool writes(access_mode mode) noexcept { return mode != access_mode::read; }

/// Returns the number of requesters that know of their acquisition.
int& granted(buffer& memory, access_mode mode) noexcept;
void take(buffer& memory, access_mode mode) noexcept;
void give_back(buffer& memory, access_mode mode) noexcept;

} // namespace troupe::detail
