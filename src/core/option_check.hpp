/// Options that are out of range are refused by name, with their value and what they may be.
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

/// Virtual devices of one process or host.
inline constexpr int most_virtual_devices = 1024;
/// A device's launch queue has no more entries: behind a full one the device can stand still.
inline constexpr std::int64_t most_in_flight = 1024;
// Far more than anything spins or pauses, and far less than a clock can count.
inline constexpr std::chrono::microseconds longest_spin = std::chrono::hours{1};
inline constexpr std::chrono::milliseconds longest_backoff = std::chrono::hours{24};
inline constexpr std::chrono::milliseconds longest_keep = std::chrono::hours{24};

/// Large sizes are all alike.
std::int64_t as_signed(std::size_t x) noexcept;

/// In the largest unit that has a whole number: "3 s", "250 ms".
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

/// @errors errc::invalid_argument, which names the one that is there twice
caf::error check_distinct(std::span<const int> devices);

/// @errors errc::invalid_argument, which names the member
caf::error check_options(const lane_options& x);
caf::error check_options(const flight_record_options& x);
caf::error check_options(const host_backend_options& x);
caf::error check_options(const cuda_backend_options& x);

} // namespace troupe::detail
