/// The parent of a worker process, as the worker sees it.
#pragma once

#include "worker/protocol/message_socket.hpp"
#include "worker/protocol/worker_page.hpp"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include <signal.h>

namespace troupe::detail {

/// Exit status of a worker whose parent is gone. Only the system's log can show it.
inline constexpr int parent_gone_status = 83;

struct worker_parent_options {
  /// Limit for the parent's hello.
  std::chrono::nanoseconds hello_limit = std::chrono::seconds{30};
  /// Called once, on a thread of the library, when the parent is gone or has closed the socket. The
  /// process ends by `_exit` when it returns, at the latest after `gone_limit`.
  std::function<void()> on_gone;
  std::chrono::nanoseconds gone_limit = std::chrono::milliseconds{500};
};

/// The worker's side of a `worker_process`.
/// One thread holds this process's life line, counts up the beats and watches the socket; another
/// watches the parent's life line. When either sees the parent's end, this process ends too, so no
/// worker is left alone.
/// The kernel kills the worker as well, even a stopped one (PR_SET_PDEATHSIG), when the thread that
/// started the worker ends: from the start of its process on, or with `on_gone`, until it attaches.
/// So that thread is the one that watches the worker until it is gone.
class worker_parent {
public:
  using arguments = std::span<char* const>;

  /// Returns true if these arguments of `main` are those of a worker.
  static bool is_worker(arguments from) noexcept;

  /// Meets the parent through the socket that the arguments name. Ignores the `program_signals`.
  /// @errors errc::invalid_argument: the argument is missing, or its descriptor is no such socket;
  ///         errc::unavailable: the parent is gone, sends no hello or has another version, or the
  ///         system refuses a resource. The parent was told if it is there. The program should end.
  static caf::expected<worker_parent> attach(arguments from, worker_parent_options options = {});

  /// Releases the life line: for the parent the worker has ended, and the process should end. Not
  /// to be called in `on_gone`.
  ~worker_parent();
  worker_parent(worker_parent&&) noexcept;
  worker_parent& operator=(worker_parent&& other) noexcept;

  /// For the owners of the page, as in the parent.
  message_socket& socket() const noexcept;
  std::span<std::byte> area() const noexcept;
  work_progress& progress() const noexcept;

  /// Tells the parent why this process is about to end: the notice of the end carries it. Does not
  /// allocate or lock. Only the first report counts, up to about 1,000 bytes.
  /// @thread any; a signal handler too
  void report_failure(std::int32_t code, std::string_view text,
                      std::int32_t native_code = 0) const noexcept;

private:
  class state;
  explicit worker_parent(std::unique_ptr<state> x) noexcept;

  std::unique_ptr<state> state_;
};

/// Returns the signals that end or stop a process by default, without SIGKILL, SIGSTOP and the
/// signals of a process's own fault (SIGSEGV, SIGABRT, ...).
/// They are meant for the program: a terminal or `kill` sends them to its whole process group, a
/// batch system to all processes of a job. Workers have state to lose, and end with their parent.
sigset_t program_signals() noexcept;

/// Refuses if this process was started as a worker and is none, and tells the parent. A program
/// without `worker_main` would run as usual, and start workers that are the same program.
/// @errors errc::unavailable: it was started as a worker and is none, or `worker_main` has returned
caf::error refuse_in_unmet_worker();
/// Notes that `worker_main` has returned: the program is a worker and has nothing more to do.
void set_over_as_worker() noexcept;

} // namespace troupe::detail
