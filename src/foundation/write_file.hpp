/// Writing of files, at names at which other programs may have put something.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace troupe::detail {

/// Why a file was not written.
struct file_failure {
  const char* api = ""; ///< the system call that failed; empty: `path` is no regular file
  int code = 0;         ///< its errno
  std::string left;     ///< the temporary file, if it could not be removed
};

/// Returns the reason as text.
std::string to_string(const file_failure& x);

/// Writes a file with mode 0600 and this content. A reader finds the complete new file, or what was
/// at `path` before. A temporary file beside it gets the content, with a random name, and takes its
/// place when it is complete. It is created exclusively: no link is followed, and nothing is opened
/// that was there. A link at `path` is replaced. A device, a FIFO or a socket is left as it is, as
/// are links to them and into /proc (/dev/stdout).
std::optional<file_failure> replace_file(const std::string& path, std::string_view content);

/// Writes all of `text`. Returns false on an error; errno has the reason.
bool write_all(int native, std::string_view text) noexcept;

} // namespace troupe::detail
