/// Range checks for options. Each error names the option, its value and the allowed range.
#pragma once

#include <troupe/backend.hpp>
#include <troupe/error.hpp>
#include <troupe/runtime_options.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace troupe::detail {

/// Limit of virtual devices in one process or on one host.
inline constexpr int most_virtual_devices = 1024;
/// Entries in a device's launch queue. Behind a full queue the device can hang.
inline constexpr std::int64_t most_in_flight = 1024;
// Far longer than any useful spin or pause, and far shorter than the range of a clock.
inline constexpr std::chrono::microseconds longest_spin = std::chrono::hours{1};
inline constexpr std::chrono::milliseconds longest_backoff = std::chrono::hours{24};
inline constexpr std::chrono::milliseconds longest_keep = std::chrono::hours{24};

/// Converts `x`; sizes above INT64_MAX become INT64_MAX.
std::int64_t as_signed(std::size_t x) noexcept;

/// Returns `x` in the largest unit that gives a whole number: "3 s", "250 ms".
std::string text_of(std::chrono::nanoseconds x);

/// @errors errc::invalid_argument: `value` is less than `least` or more than `most`
caf::error check_option(std::string_view name, std::int64_t value, std::int64_t least,
                        std::int64_t most, std::string_view unit = {});
/// @errors errc::invalid_argument: `value` is less than `least`
caf::error check_at_least(std::string_view name, std::int64_t value, std::int64_t least,
                          std::string_view unit = {});
/// @errors errc::invalid_argument: `value` is negative, or zero
caf::error check_positive(std::string_view name, std::chrono::nanoseconds value);
/// @errors errc::invalid_argument: `value` is negative
caf::error check_not_negative(std::string_view name, std::chrono::nanoseconds value);

/// @errors errc::invalid_argument, which names the duplicate
caf::error check_distinct(std::span<const int> devices);

/// @errors errc::invalid_argument, which names the member
caf::error check_options(const lane_options& x);
caf::error check_options(const flight_record_options& x);
caf::error check_options(const host_backend_options& x);
caf::error check_options(const cuda_backend_options& x);

} // namespace troupe::detail
