#include "foundation/error_text.hpp"

#include "foundation/peer_text.hpp"

#include <utility>

namespace troupe::detail {

caf::error refusal(std::string_view verb, errc code, std::string detail) {
  return refusal(verb, -1, code, std::move(detail));
}

caf::error refusal(std::string_view verb, int device, errc code, std::string detail) {
  return make_error(
      {.code = code, .detail = std::move(detail), .verb = std::string{verb}, .device = device});
}

caf::error build_called_off() {
  return make_error(errc::unavailable, "the build of the communicator was called off");
}

caf::error brief(const caf::error& why) {
  if (!why)
    return why;
  auto x = failure_of(why);
  if (!x) // sent as an error of this library
    x.emplace().detail = describe(why);
  if (x->detail.size() <= most_peer_text)
    return why;
  x->detail = peer_text(x->detail);
  return make_error(std::move(*x));
}

std::string out_of_range(std::string_view what, std::int64_t number, std::size_t size) {
  return std::string{what} + ' ' + std::to_string(number) + " is out of range: the world has " +
         std::to_string(size) + (size == 1 ? " rank" : " ranks");
}

std::string device_out_of_range(int ordinal, int count) {
  return "device " + std::to_string(ordinal) + " is out of range: there are " +
         std::to_string(count) + " devices";
}

std::string device_is(device_phase phase) {
  return "the device is " + std::string{to_string(phase)};
}

std::string unknown_dtype(dtype type) {
  return "unknown dtype " + std::to_string(static_cast<int>(type));
}

std::string size_overflows(std::size_t count, dtype type) {
  return std::to_string(count) + " elements of " + std::string{to_string(type)} +
         ": the size in bytes overflows";
}

} // namespace troupe::detail
