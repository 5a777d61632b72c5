#include "foundation/write_file.hpp"

#include <array>
#include <cerrno>
#include <cstdio>
#include <system_error>

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

namespace troupe::detail {

namespace {

/// Returns whether a file can take the place of what is at `path`. A folder fails later, in rename.
bool can_be_replaced(const char* path) noexcept {
  constexpr std::string_view kernel = "/proc/";
  std::array<char, kernel.size()> target{};
  const auto size = ::readlink(path, target.data(), target.size());
  if (size == static_cast<ssize_t>(kernel.size()) &&
      std::string_view{target.data(), target.size()} == kernel)
    return false;
  struct stat there{};
  return ::stat(path, &there) != 0 || S_ISREG(there.st_mode) || S_ISDIR(there.st_mode);
}

/// Returns a descriptor of the same file whose number belongs to no standard stream: the program
/// may print while those are closed. errno has the reason if there is none.
int off_standard_streams(int native) noexcept {
  if (native < 0 || native > STDERR_FILENO)
    return native;
  const int result = ::fcntl(native, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  const int code = errno;
  ::close(native); // nothing was written by this number
  errno = code;
  return result;
}

/// Writes the content and closes the file. Returns the call that failed, with its errno; else null.
const char* write_and_close(int native, std::string_view content) noexcept {
  const bool is_written = write_all(native, content);
  const int code = errno;
  const bool is_closed = ::close(native) == 0 || errno == EINTR; // on Linux it is closed then, too
  if (is_written)
    return is_closed ? nullptr : "close";
  errno = code;
  return "write";
}

} // namespace

std::string to_string(const file_failure& x) {
  auto result = *x.api == '\0' ? std::string{"it is not a regular file"}
                               : std::generic_category().message(x.code);
  if (!x.left.empty())
    result += "; " + x.left + " is left, since it cannot be removed";
  return result;
}

std::optional<file_failure> replace_file(const std::string& path, std::string_view content) {
  if (!can_be_replaced(path.c_str()))
    return file_failure{};
  constexpr std::string_view suffix = ".part";
  auto unfinished = path + ".XXXXXX";
  unfinished += suffix;
  const int made = ::mkostemps(unfinished.data(), static_cast<int>(suffix.size()), O_CLOEXEC);
  if (made < 0)
    return file_failure{"mkostemps", errno, {}};
  const char* failed = "fcntl";
  if (const int file = off_standard_streams(made); file >= 0)
    failed = write_and_close(file, content);
  if (failed == nullptr && std::rename(unfinished.c_str(), path.c_str()) != 0)
    failed = "rename";
  if (failed == nullptr)
    return std::nullopt;
  file_failure result{failed, errno, {}};
  if (::unlink(unfinished.c_str()) != 0)
    result.left = unfinished;
  return result;
}

bool write_all(int native, std::string_view text) noexcept {
  while (!text.empty()) {
    const auto size = ::write(native, text.data(), text.size());
    if (size < 0 && errno != EINTR)
      return false;
    if (size > 0)
      text.remove_prefix(static_cast<std::size_t>(size));
  }
  return true;
}

} // namespace troupe::detail
