#include "worker/parent/worker_end.hpp"

namespace troupe::detail {

std::string_view to_string(noticed_by x) noexcept {
  switch (x) {
  case noticed_by::life_line:
    return "life line";
  case noticed_by::socket:
    return "socket";
  case noticed_by::process:
    return "process";
  case noticed_by::heartbeat:
    return "heartbeat";
  }
  return "unknown";
}

std::string to_string(const worker_exit& x) {
  if (x.signal != 0)
    return "signal " + std::to_string(x.signal);
  return x.status < 0 ? "an unknown status" : "status " + std::to_string(x.status);
}

} // namespace troupe::detail
