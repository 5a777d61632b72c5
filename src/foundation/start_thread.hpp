/// Starts the library's threads. A failure to start one is an error value.
#pragma once

#include "foundation/system_call.hpp"

#include <cerrno>
#include <memory>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>

#include <pthread.h>

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

/// Creates a detached thread. Returns an errno, or 0.
[[nodiscard]] int create_detached(void* (*run)(void*), void* of) noexcept;

/// Starts a thread that nothing waits for. It is detached from its beginning: `pthread_detach` of
/// another thread may access memory of that thread which is unmapped when it ends meanwhile.
/// Returns an errno, or 0.
template <class Work> [[nodiscard]] int try_detached_thread(Work&& work) {
  using own_work = std::decay_t<Work>;
  std::unique_ptr<own_work> own;
  try {
    own = std::make_unique<own_work>(std::forward<Work>(work));
  } catch (const std::bad_alloc&) {
    return ENOMEM;
  }
  constexpr auto run = [](void* of) noexcept -> void* {
    (*std::unique_ptr<own_work>{static_cast<own_work*>(of)})();
    return nullptr;
  };
  const int code = create_detached(run, own.get());
  if (code == 0)
    static_cast<void>(own.release()); // the thread has it
  return code;
}

/// The same with an error value, as `start_thread`.
/// @errors errc::unavailable: the system gives none
template <class Work>
[[nodiscard]] caf::error start_detached_thread(Work&& work, const std::string& purpose) {
  if (const int code = try_detached_thread(std::forward<Work>(work)))
    return system_failure("pthread_create", code, "no thread " + purpose);
  return {};
}

/// Lets a thread end by itself. @thread any, also that thread
void leave_thread(std::thread x);

} // namespace troupe::detail
