/// Errors and error texts that several modules use.
#pragma once

#include <troupe/device_status.hpp>
#include <troupe/dtype.hpp>
#include <troupe/error.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace troupe::detail {

/// Returns the error of a request that is refused.
caf::error refusal(std::string_view verb, errc code, std::string detail);
caf::error refusal(std::string_view verb, int device, errc code, std::string detail);

caf::error build_called_off();

/// Returns the text for a `what` of `number`, which is not a rank of a world of `size` ranks.
std::string out_of_range(std::string_view what, std::int64_t number, std::size_t size);
/// Returns the text for `ordinal`, which is none of the `count` devices.
std::string device_out_of_range(int ordinal, int count);
/// Returns the text for a device that is not ready.
std::string device_is(device_phase phase);
std::string unknown_dtype(dtype type);
/// Returns the text for `count` elements of `type`, whose size in bytes overflows.
std::string size_overflows(std::size_t count, dtype type);

} // namespace troupe::detail
