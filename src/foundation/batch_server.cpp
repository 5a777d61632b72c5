#include "foundation/log.hpp"
#include <troupe/batch_server.hpp>

#include <chrono>
#include <string>

namespace troupe::detail {

caf::error late_request(std::chrono::nanoseconds limit) {
  const auto us = std::chrono::duration_cast<std::chrono::microseconds>(limit).count();
  const auto text = us % 1000 == 0 ? std::to_string(us / 1000) + " ms" : std::to_string(us) + " us";
  return make_error(errc::deadline_exceeded, "no answer within " + text);
}

caf::error wrong_number_of_results(std::size_t results, std::size_t requests) {
  return make_error(errc::shape_mismatch, "the run of a batch of " + std::to_string(requests) +
                                              " requests returned " + std::to_string(results) +
                                              " results");
}

bool tells_of_loss(const caf::error& why) {
  const auto code = cause_of(why);
  return code && severity_of(*code) >= severity::device;
}

void log_end_of_replica(int device, const caf::error& why) noexcept {
  log(log_level::error, "the replica on device " + std::to_string(device) + " serves no more", why);
}

} // namespace troupe::detail
