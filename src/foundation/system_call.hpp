/// Errors and time limits of operating system calls.
#pragma once

#include <troupe/error.hpp>

#include <chrono>
#include <string>

#include <signal.h>

namespace troupe::detail {

/// Returns the error of `api`; `code` is an errno. Names the limit if no more files can be opened.
caf::error system_failure(const char* api, int code, std::string detail);

/// Returns the limit that an errno is about, as text; empty if it is about none.
std::string limit_text(int code);

/// Returns `why`, a failure to get memory from the system, as errc::out_of_memory. Returns it
/// unchanged if no more files can be opened, because more free memory would not help.
caf::error as_out_of_memory(const caf::error& why);

/// Returns the text of an errno.
std::string system_text(int code);

using time_limit = std::chrono::steady_clock::time_point;
inline constexpr time_limit no_limit = time_limit::max();

/// Returns the time-out for `poll`: milliseconds, rounded up; -1 for `no_limit`.
int poll_limit(time_limit until) noexcept;

/// While it exists, calls of this thread beyond the limit of file sizes (RLIMIT_FSIZE, also for
/// shared memory) fail with EFBIG. Otherwise SIGXFSZ would end the process. The signal's action
/// belongs to the program and is not changed. errno keeps the value of the last call.
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
