/// Launches that are made where the device lives, be it a worker process. They are registered.
#pragma once

#include <troupe/device.hpp>

#include <span>
#include <string>
#include <vector>

namespace troupe::testing {

/// A call of a host function in stream order, which does nothing.
pending<void> launch_nothing(const device& on, std::vector<any_gpu_ref> reads = {},
                             std::vector<any_gpu_ref> writes = {}, request_options options = {});
/// Gives an error with that text.
pending<void> launch_failure(const device& on, const std::string& text,
                             std::vector<any_gpu_ref> writes, request_options options = {});
/// Throws a std::runtime_error with that text.
pending<void> launch_exception(const device& on, const std::string& text);
/// The same, in what it has the host run in stream order.
pending<void> launch_host_exception(const device& on, const std::string& text);
/// Writes `content` in stream order. On the host backend.
/// @shape content: as long as `to`
pending<void> launch_write(const device& on, const any_gpu_ref& to,
                           std::span<const std::byte> content);
/// The process of the device is killed.
pending<void> launch_death(const device& on);
/// Copies in stream order. On the host backend.
/// @shape of the same size
pending<void> launch_copy(const device& on, const any_gpu_ref& to, const any_gpu_ref& from);

} // namespace troupe::testing
