#include "core/file_descriptor.hpp"

#include "core/log.hpp"
#include "core/system_call.hpp"

#include <cerrno>
#include <cstdint>

#include <sys/eventfd.h>
#include <unistd.h>

namespace troupe::detail {

/// Linux has closed it whatever it says.
void file_descriptor::reset() noexcept {
  if (native_ >= 0 && ::close(release()) != 0 && errno != EINTR)
    log(log_level::error, "a file descriptor", system_failure("close", errno, "cannot close it"));
}

caf::expected<wake_up> wake_up::create() {
  file_descriptor event{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  if (!event)
    return system_failure("eventfd", errno, "no means to wake a thread");
  return wake_up{std::move(event)};
}

/// EAGAIN: it was signalled more often than it can count, and is.
void wake_up::signal() const noexcept {
  const std::uint64_t one = 1;
  while (::write(event_.get(), &one, sizeof one) < 0 && errno == EINTR) {
  }
}

void wake_up::clear() const noexcept {
  std::uint64_t count = 0;
  static_cast<void>(!::read(event_.get(), &count, sizeof count)); // perhaps there was none
}

} // namespace troupe::detail
