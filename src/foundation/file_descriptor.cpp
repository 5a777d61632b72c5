#include "foundation/file_descriptor.hpp"

#include "foundation/log.hpp"
#include "foundation/system_call.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

namespace troupe::detail {

int file_descriptor::off_standard_streams(int native) noexcept {
  const int result = ::fcntl(native, F_DUPFD_CLOEXEC, last_standard_stream + 1);
  const int code = errno == EINVAL ? EMFILE : errno; // the limit is below the requested number
  if (::close(native) != 0 && errno != EINTR)
    log(log_level::error, "a file descriptor", system_failure("close", errno, "cannot close it"));
  errno = code;
  return result;
}

/// Closes the descriptor. Linux closes it even if `close` returns an error.
void file_descriptor::reset() noexcept {
  if (native_ >= 0 && ::close(release()) != 0 && errno != EINTR)
    log(log_level::error, "a file descriptor", system_failure("close", errno, "cannot close it"));
}

void raise_descriptor_limit(std::size_t more) noexcept {
  rlimit now{};
  if (::getrlimit(RLIMIT_NOFILE, &now) != 0)
    return log(log_level::warning, "the limit of open files",
               system_failure("getrlimit", errno, "cannot read it"));
  if (now.rlim_cur == RLIM_INFINITY)
    return;
  const auto wanted = std::min<rlim_t>(now.rlim_max, now.rlim_cur + more);
  if (wanted <= now.rlim_cur)
    return;
  now.rlim_cur = wanted;
  if (::setrlimit(RLIMIT_NOFILE, &now) != 0)
    log(log_level::warning, "the limit of open files",
        system_failure("setrlimit", errno, "cannot raise it"));
}

caf::error fill_standard_streams() noexcept {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    while (::fcntl(stream, F_GETFD) < 0 && errno == EBADF) {
      const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
      if (null < 0)
        return system_failure("open", errno, "cannot open /dev/null for a closed standard stream");
      if (null > STDERR_FILENO) // another thread has filled it first
        file_descriptor{null}.reset();
    }
  return {};
}

caf::expected<std::string> read_file(const std::string& path) {
  const file_descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (!file)
    return system_failure("open", errno, "cannot open " + path);
  std::string result;
  std::array<char, 16384> some;
  while (true) {
    const auto size = ::read(file.get(), some.data(), some.size());
    if (size < 0 && errno == EINTR)
      continue;
    if (size < 0)
      return system_failure("read", errno, "cannot read " + path);
    if (size == 0)
      return result;
    result.append(some.data(), static_cast<std::size_t>(size));
  }
}

caf::expected<wake_up> wake_up::create() {
  file_descriptor event{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  if (!event)
    return system_failure("eventfd", errno, "cannot create an eventfd");
  return wake_up{std::move(event)};
}

/// EAGAIN needs no retry: the counter is at its maximum, so the event is signalled.
void wake_up::signal() const noexcept {
  const std::uint64_t one = 1;
  while (::write(event_.get(), &one, sizeof one) < 0 && errno == EINTR) {
  }
}

void wake_up::clear() const noexcept {
  std::uint64_t count = 0;
  static_cast<void>(!::read(event_.get(), &count, sizeof count)); // fails if it was not signalled
}

} // namespace troupe::detail
