/// Errors and error texts that several modules use.
#pragma once

#include <troupe/device_status.hpp>
#include <troupe/dtype.hpp>
#include <troupe/error.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace troupe::detail {

/// Returns the error of a request that is refused.
caf::error refusal(std::string_view verb, errc code, std::string detail);
caf::error refusal(std::string_view verb, int device, errc code, std::string detail);

caf::error build_called_off();

/// Sets `first` to `next`, unless it is an error already.
inline void keep_first(caf::error& first, caf::error next) noexcept {
  if (next && !first)
    first = std::move(next);
}

/// Returns `why` with a text short enough for a note to another process.
/// @param why may be an error of another library
caf::error brief(const caf::error& why);

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
