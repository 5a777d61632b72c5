#include "foundation/option_check.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

namespace troupe::detail {

namespace {

using namespace std::chrono_literals;

caf::error refuse(std::string_view name, const std::string& value, const std::string& range) {
  return make_error(errc::invalid_argument,
                    std::string{name} + '=' + value + " is out of range: " + range);
}

std::string with_unit(std::int64_t value, std::string_view unit) {
  auto text = std::to_string(value);
  if (!unit.empty())
    (text += ' ').append(unit);
  return text;
}

} // namespace

std::int64_t as_signed(std::size_t x) noexcept {
  constexpr std::size_t most = std::numeric_limits<std::int64_t>::max();
  return static_cast<std::int64_t>(std::min(x, most));
}

std::string text_of(std::chrono::nanoseconds x) {
  const std::array<std::pair<std::int64_t, const char*>, 3> units{
      {{1'000'000'000, " s"}, {1'000'000, " ms"}, {1'000, " us"}}};
  for (auto [size, name] : units)
    if (x.count() % size == 0)
      return std::to_string(x.count() / size) + name;
  return std::to_string(x.count()) + " ns";
}

caf::error check_option(std::string_view name, std::int64_t value, std::int64_t least,
                        std::int64_t most, std::string_view unit) {
  if (value >= least && value <= most)
    return {};
  return refuse(name, with_unit(value, unit),
                "it is from " + std::to_string(least) + " to " + with_unit(most, unit));
}

caf::error check_at_least(std::string_view name, std::int64_t value, std::int64_t least,
                          std::string_view unit) {
  if (value >= least)
    return {};
  return refuse(name, with_unit(value, unit), "it is at least " + with_unit(least, unit));
}

caf::error check_positive(std::string_view name, std::chrono::nanoseconds value) {
  return value > 0ns ? caf::error{} : refuse(name, text_of(value), "it is more than 0");
}

caf::error check_not_negative(std::string_view name, std::chrono::nanoseconds value) {
  return value >= 0ns ? caf::error{} : refuse(name, text_of(value), "it is 0 or more");
}

caf::error check_distinct(std::span<const int> devices) {
  for (std::size_t i = 0; i < devices.size(); ++i)
    if (std::find(devices.begin(), devices.begin() + static_cast<std::ptrdiff_t>(i), devices[i]) !=
        devices.begin() + static_cast<std::ptrdiff_t>(i))
      return make_error(errc::invalid_argument,
                        "device " + std::to_string(devices[i]) + " is listed twice");
  return {};
}

caf::error check_options(const lane_options& x) {
  if (auto error = check_option("lane_options::in_flight_limit", as_signed(x.in_flight_limit), 1,
                                most_in_flight))
    return error;
  if (auto error = check_at_least("lane_options::queue_limit", as_signed(x.queue_limit), 1))
    return error;
  if (auto error = check_at_least("lane_options::open_attempts", x.open_attempts, 1))
    return error;
  if (auto error = check_option("lane_options::open_backoff", x.open_backoff.count(), 0,
                                longest_backoff.count(), "ms"))
    return error;
  for (auto& [name, spin] : {std::pair{"lane_options::spin", x.spin},
                             std::pair{"lane_options::client_spin", x.client_spin}})
    if (spin)
      if (auto error = check_option(name, spin->count(), 0, longest_spin.count(), "us"))
        return error;
  return {};
}

caf::error check_options(const flight_record_options& x) {
  return check_at_least("flight_record_options::files", as_signed(x.files), 1);
}

caf::error check_options(const host_backend_options& x) {
  if (auto error =
          check_option("host_backend_options::devices", x.devices, 1, most_virtual_devices))
    return error;
  for (auto& link : x.links)
    for (auto end : {link.from, link.to})
      if (auto error = check_option("host_link to or from device", end, 0, x.devices - 1))
        return error;
  return {};
}

caf::error check_options(const cuda_backend_options& x) {
  if (x.keep_freed == cuda_backend_options::forever)
    return {};
  return check_option("cuda_backend_options::keep_freed", x.keep_freed.count(), 0,
                      longest_keep.count(), "ms");
}

} // namespace troupe::detail
