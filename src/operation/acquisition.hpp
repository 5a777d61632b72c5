/// Buffers that a user stream or another process has acquired.
#pragma once

#include "operation/buffer.hpp"
#include <troupe/launch.hpp>

namespace troupe::detail {

inline bool reads(access_mode mode) noexcept { return mode != access_mode::write; }
inline bool writes(access_mode mode) noexcept { return mode != access_mode::read; }

/// Returns the number of requesters that know of their acquisition.
int& granted(locked, buffer& memory, access_mode mode) noexcept;
void take(locked, buffer& memory, access_mode mode) noexcept;
void give_back(locked, buffer& memory, access_mode mode) noexcept;

} // namespace troupe::detail
