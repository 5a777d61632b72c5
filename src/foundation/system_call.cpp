#include "foundation/system_call.hpp"

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <limits>
#include <system_error>
#include <utility>

#include <sys/resource.h>

namespace troupe::detail {

std::string system_text(int code) { return std::generic_category().message(code); }

int poll_limit(time_limit until) noexcept {
  if (until == no_limit)
    return -1;
  const auto left = until - std::chrono::steady_clock::now();
  const auto ms = std::chrono::ceil<std::chrono::milliseconds>(left).count();
  constexpr decltype(ms) most = std::numeric_limits<int>::max();
  return static_cast<int>(std::clamp<decltype(+ms)>(ms, 0, most));
}

std::string limit_text(int code) {
  if (code == ENFILE)
    return "the machine has reached its limit of open files (fs.file-max)";
  if (code != EMFILE)
    return {};
  rlimit files{};
  const bool known = ::getrlimit(RLIMIT_NOFILE, &files) == 0;
  return "the process has reached its limit of " +
         (known ? std::to_string(files.rlim_cur) + " " : std::string{}) +
         "open files (RLIMIT_NOFILE)";
}

caf::error as_out_of_memory(const caf::error& why) {
  const auto told = failure_of(why);
  if (told && (told->native_code == EMFILE || told->native_code == ENFILE) && !told->api.empty())
    return why;
  return make_error(errc::out_of_memory, describe(why));
}

caf::error system_failure(const char* api, int code, std::string detail) {
  if (auto limit = limit_text(code); !limit.empty())
    detail += (detail.empty() ? "" : ": ") + limit;
  return make_error({.code = errc::unavailable,
                     .detail = std::move(detail),
                     .api = api,
                     .native_name = system_text(code),
                     .native_code = code});
}

namespace {

sigset_t file_size_signal() noexcept {
  sigset_t result;
  ::sigemptyset(&result);
  ::sigaddset(&result, SIGXFSZ);
  return result;
}

} // namespace

// These calls cannot fail with the arguments that they get here.

no_file_size_signal::no_file_size_signal() noexcept {
  const auto wanted = file_size_signal();
  ::pthread_sigmask(SIG_BLOCK, &wanted, &before_);
  sigset_t pending;
  ::sigpending(&pending);
  was_pending_ = ::sigismember(&pending, SIGXFSZ) == 1;
}

/// The kernel sends the signal to the thread that made the call, before the call returns.
no_file_size_signal::~no_file_size_signal() {
  const int code = errno;
  const auto sent = file_size_signal();
  constexpr timespec at_once{};
  while (!was_pending_ && ::sigtimedwait(&sent, nullptr, &at_once) < 0 && errno == EINTR) {
  }
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  errno = code;
}

} // namespace troupe::detail
