#include "backend/cuda/exit_watch.hpp"

#include "foundation/log.hpp"
#include <troupe/log.hpp>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <thread>

#include <unistd.h>

namespace troupe::detail {

namespace {

constexpr std::chrono::milliseconds patience{500};

/// Handlers run in reverse order of registration. This one runs before the handlers of libraries
/// that were loaded before the fault.
void on_exit_begun(int status, void*) noexcept {
  try {
    std::thread{[status] {
      std::this_thread::sleep_for(patience);
      ::_exit(status);
    }}.detach();
  } catch (const std::exception&) {
    ::_exit(status); // no thread to watch the exit
  }
}

} // namespace

void watch_exit() noexcept {
  static std::atomic<bool> watched{false};
  if (!watched.exchange(true) && ::on_exit(on_exit_begun, nullptr) != 0)
    log(log_level::warning, "the time that the end of the process takes is not limited");
}

} // namespace troupe::detail
