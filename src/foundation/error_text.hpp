/// Error texts that several modules use.
#pragma once

#include <troupe/dtype.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace troupe::detail {

/// Returns the text for a `what` of `number`, which is not a rank of a world of `size` ranks.
std::string out_of_range(std::string_view what, std::int64_t number, std::size_t size);
/// Returns the text for `ordinal`, which is none of the `count` devices.
std::string device_out_of_range(int ordinal, int count);
std::string unknown_dtype(dtype type);
/// Returns the text for `count` elements of `type`, whose size in bytes overflows.
std::string size_overflows(std::size_t count, dtype type);

} // namespace troupe::detail
