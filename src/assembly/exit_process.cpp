#include "flight/flight_recorder.hpp"
#include "foundation/log.hpp"
#include "foundation/start_thread.hpp"
#include "foundation/write_file.hpp"
#include <troupe/exit_process.hpp>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <exception>
#include <future>
#include <iostream>
#include <string>
#include <utility>

#include <signal.h>
#include <unistd.h>

namespace troupe {

namespace {

constexpr std::chrono::milliseconds patience{500};

/// Writes without the locks of stdio, which a stuck thread may hold. Lost if it cannot be written.
void write_to_stderr(std::string_view text) noexcept {
  static_cast<void>(detail::write_all(STDERR_FILENO, text));
}

void write_all(const std::string& line, detail::clock::time_point until, bool has_log) {
  write_to_stderr(line);
  if (!detail::flight_recorder::wait_written(until))
    write_to_stderr("the flight record is not complete\n");
  if (has_log)
    static_cast<void>(detail::drain_log(patience / 2)); // lost if the sink is slow
  detail::flush_log();
  std::cout.flush();
  (void)std::fflush(stdout); // an error can no longer be reported
}

/// Writes the output, for at most `patience`. Each step may block: in a lock that a stuck thread
/// holds, or in a pipe without a reader.
void write_all_in_time(const std::string& line) noexcept {
  try {
    const auto until = detail::clock::now() + patience;
    const bool has_log = !detail::is_in_log_sink(); // else this call would wait for itself
    std::promise<void> promise;
    const auto done = promise.get_future();
    const int code =
        detail::try_detached_thread([promise = std::move(promise), line, until, has_log]() mutable {
          write_all(line, until, has_log);
          promise.set_value();
        });
    if (code == 0) {
      done.wait_until(until);
      return;
    }
  } catch (const std::exception&) { // no memory for it
  }
  write_to_stderr(line); // there is no thread for the rest
}

} // namespace

void exit_process(int code, std::string_view message) noexcept {
  static std::atomic_flag decided;
  while (decided.test_and_set())
    ::pause();
  // The exit status is `code`, even if stderr is a closed pipe or a full file.
  sigset_t of_writing;
  ::sigemptyset(&of_writing);
  ::sigaddset(&of_writing, SIGPIPE);
  ::sigaddset(&of_writing, SIGXFSZ);
  ::pthread_sigmask(SIG_BLOCK, &of_writing, nullptr);
  std::string line;
  try {
    line.assign(message).append("\n");
  } catch (const std::exception&) { // no memory for it
  }
  write_all_in_time(line);
  ::_exit(code);
}

} // namespace troupe
