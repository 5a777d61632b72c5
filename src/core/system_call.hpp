/// What calls of the operating system say when they fail.
#pragma once

#include <troupe/error.hpp>

#include <string>

#include <signal.h>

namespace troupe::detail {

/// `code` is an errno. If the table of open files is full, the text names the limit.
caf::error system_failure(const char* api, int code, std::string detail);

/// The limit that an errno is about, as text; empty for one that is about none.
std::string limit_text(int code);

/// `why`, a failure to get memory of the system, as errc::out_of_memory; as it is if no more files
/// can be opened, which more free memory would not mend.
caf::error as_out_of_memory(const caf::error& why);

/// The text of an errno.
std::string system_text(int code);

/// Lets calls of this thread that go beyond the limit of file sizes (RLIMIT_FSIZE, which counts for
/// shared memory too) fail with EFBIG, where SIGXFSZ would end the process. The signal's action,
/// which is the program's, stays as it is. errno stays as the last call left it.
class no_file_size_signal {
public:
  no_file_size_signal() noexcept;
  ~no_file_size_signal();
  no_file_size_signal(const no_file_size_signal&) = delete;
  no_file_size_signal& operator=(const no_file_size_signal&) = delete;

private:
  sigset_t before_{};
  bool was_pending_ = false;
};

} // namespace troupe::detail
