/// Starts the library's threads. A failure to start one is an error value.
#pragma once

#include "foundation/system_call.hpp"

#include <cerrno>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace troupe::detail {

/// Starts a thread. After an error, `work` may be moved from, and `into` is unchanged.
/// @param purpose completes "no thread "
/// @errors errc::unavailable: the system gives none
template <class Thread, class Work>
[[nodiscard]] caf::error start_thread(Thread& into, Work&& work, const std::string& purpose) {
  int code = ENOMEM;
  try {
    into = Thread{std::forward<Work>(work)};
    return {};
  } catch (const std::system_error& e) {
    code = e.code().value();
  } catch (const std::bad_alloc&) { // for the thread's own copy of `work`
  }
  return system_failure("pthread_create", code, "no thread " + purpose);
}

/// The same for a thread that nothing waits for.
template <class Work>
[[nodiscard]] caf::error start_detached_thread(Work&& work, const std::string& purpose) {
  std::thread own;
  auto error = start_thread(own, std::forward<Work>(work), purpose);
  if (!error)
    own.detach();
  return error;
}

} // namespace troupe::detail
