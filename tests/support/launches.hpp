/// Registered launches, which run in the process of the device, possibly a worker process.
#pragma once

#include <troupe/device.hpp>

#include <span>
#include <string>
#include <vector>

namespace troupe::testing {

/// Launches a host function in stream order that does nothing.
pending<void> launch_nothing(const device& on, std::vector<any_gpu_ref> reads = {},
                             std::vector<any_gpu_ref> writes = {}, request_options options = {});
/// Launches a callable that returns an error with this text.
pending<void> launch_failure(const device& on, const std::string& text,
                             std::vector<any_gpu_ref> writes, request_options options = {});
/// Launches a callable that throws a std::runtime_error with this text.
pending<void> launch_exception(const device& on, const std::string& text);
/// Launches a host function in stream order that throws a std::runtime_error with this text.
pending<void> launch_host_exception(const device& on, const std::string& text);
/// Writes `content` in stream order. On the host backend only.
/// @shape content: as long as `to`
pending<void> launch_write(const device& on, const any_gpu_ref& to,
                           std::span<const std::byte> content);
/// Kills the process of the device.
pending<void> launch_death(const device& on);
/// Copies in stream order. On the host backend only.
/// @shape `to` and `from` have the same size
pending<void> launch_copy(const device& on, const any_gpu_ref& to, const any_gpu_ref& from);

} // namespace troupe::testing
