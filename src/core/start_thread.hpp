/// Threads of the library are started here, where the lack of one is an error value.
#pragma once

#include "core/system_call.hpp"

#include <cerrno>
#include <new>
#include <string>
#include <system_error>
#include <utility>

namespace troupe::detail {

/// Starts a thread. After an error, `work` is gone, and `into` is as it was.
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

} // namespace troupe::detail
