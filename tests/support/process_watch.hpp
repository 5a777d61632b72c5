/// Waiting for the end of other processes.
#pragma once

#include "foundation/file_descriptor.hpp"

#include <cerrno>
#include <chrono>
#include <stdexcept>
#include <string>

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace troupe::testing {

inline detail::file_descriptor watch_of(pid_t id) {
  detail::file_descriptor result{static_cast<int>(::syscall(SYS_pidfd_open, id, 0))};
  if (!result)
    throw std::runtime_error("pidfd_open: " + std::to_string(errno));
  return result;
}

/// Returns true if `x` is readable in time. A process descriptor is, once its process has ended.
inline bool is_ready(const detail::file_descriptor& x, std::chrono::milliseconds limit) {
  pollfd wanted{x.get(), POLLIN, 0};
  int ready = 0;
  do
    ready = ::poll(&wanted, 1, static_cast<int>(limit.count()));
  while (ready < 0 && errno == EINTR);
  return ready > 0;
}

} // namespace troupe::testing
