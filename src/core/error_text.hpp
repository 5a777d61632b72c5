/// Texts of errors that several modules give.
#pragma once

#include <troupe/dtype.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace troupe::detail {

/// `what` is `number`, which is no rank of a world of `size` ranks.
std::string out_of_range(std::string_view what, std::int64_t number, std::size_t size);
/// `ordinal` is none of the `count` devices.
std::string device_out_of_range(int ordinal, int count);
std::string unknown_dtype(dtype type);
/// So many elements have more bytes than a size can count.
std::string size_overflows(std::size_t count, dtype type);

} // namespace troupe::detail
