/// A supervised child process, as its parent sees it.
#pragma once

#include "worker/message_socket.hpp"
#include "worker/worker_page.hpp"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include <sys/types.h>

namespace troupe::detail {

struct worker_options {
  std::string program;                ///< a path; no search in PATH
  std::string name;                   ///< argument 0, and in messages; empty: the program
  std::vector<std::string> arguments; ///< after the program's name; `worker_flag` is added
  std::size_t area_bytes = 0;         ///< shared memory for the owners of the page
  /// From the start to the worker's hello.
  std::chrono::nanoseconds hello_limit = std::chrono::seconds{10};
  /// A worker whose beats stand still for longer is killed; 0: never. Time in which this process
  /// stood still itself does not count. While the system writes a core dump of a worker, that
  /// stands still as well, and its life line is held: it is taken for stuck and its dump is cut. A
  /// program that wants to see the signal soon has no core dumps of its workers (RLIMIT_CORE).
  std::chrono::nanoseconds stuck_limit = std::chrono::seconds{1};
  std::chrono::nanoseconds beat_period = std::chrono::milliseconds{5};
  /// A worker that is inside one call (`work_progress`) for longer is killed; 0: never. Time in
  /// which this process stood still itself does not count.
  std::chrono::nanoseconds call_limit{0};
  /// A worker that let go, or closed its socket, is killed if it has not ended by then.
  std::chrono::nanoseconds exit_limit = std::chrono::seconds{5};
  /// How long the destructor waits for the end of a worker that was killed. What the kernel has not
  /// ended by then, because of a device that does not come back, is left to a thread.
  std::chrono::nanoseconds destroy_limit = std::chrono::seconds{10};
  /// Ends the start, which fails then.
  std::stop_token stop;
};

enum class end_cause : std::uint8_t {
  died,    ///< by itself: a signal, or an exit without letting go
  let_go,  ///< the worker has let go on purpose, and is about to end
  hung_up, ///< it has closed its socket, though its life line is held
  stuck,   ///< its beats stood still: it was killed
  busy,    ///< it was inside one call for too long: it was killed
  killed   ///< by its owner
};

enum class noticed_by : std::uint8_t {
  life_line, ///< at once
  socket,    ///< when its files were closed
  process,   ///< when all of it was gone
  heartbeat  ///< it was killed and is still not gone
};

std::string_view to_string(end_cause x) noexcept;
std::string_view to_string(noticed_by x) noexcept;

/// What is known of a worker's end when it is noticed. Its process may need some time to go: what
/// it used, a device's memory too, is free only when it was reaped.
struct worker_end {
  end_cause cause = end_cause::died;
  noticed_by noticed = noticed_by::life_line;
  std::chrono::steady_clock::time_point when;
  std::optional<worker_report> report; ///< what the worker said itself
  std::uint32_t call = 0;              ///< of a busy one: `work_progress::call`
};

/// How a process ended. Neither is known if somebody else has reaped it.
struct worker_exit {
  int status = -1; ///< -1: not by an exit
  int signal = 0;  ///< 0: not by a signal
};

/// "status 3", "signal 9"
std::string to_string(const worker_exit& x);

/// Each is called once for every worker that was started, in this order, on a thread of the worker,
/// maybe before `start` has returned. They may destroy the worker; none is called after that. They
/// must not throw, nor block for long.
struct worker_listener {
  std::function<void(const worker_end&)> ended;
  std::function<void(const worker_exit&)> reaped; ///< no zombie is left
};

/// Starts, watches and ends a worker. It needs no handler of SIGCHLD and waits for no process but
/// its own, so that it gets along with all that the program does with children.
/// @thread any
class worker_process {
public:
  /// Returns when the worker has said hello, which `worker_parent::attach` does.
  ///
  /// The worker has standard input, output and error of this process, its socket, and no other
  /// descriptor. A standard stream that is closed here, or not for other programs (close-on-exec),
  /// is /dev/null there. All signals have the default action. The worker is in a process group of
  /// its own, where no signal of a terminal or for this process's group reaches it, and all
  /// `program_signals` are blocked until `worker_parent::attach` ignores them.
  /// @errors errc::invalid_argument: options that can never be right; errc::unavailable: the
  /// program
  ///         cannot be started, ended at once, did not say hello in time, refuses, has another
  ///         version, or somebody stopped the start. Nothing of it is left.
  static caf::expected<worker_process> start(worker_options options, worker_listener listener = {});

  /// Kills the worker, and waits until it was reaped and its listener has returned. In a listener
  /// it does not wait.
  ~worker_process();
  worker_process(worker_process&&) noexcept = default;
  worker_process& operator=(worker_process&& other) noexcept;

  pid_t id() const noexcept;
  /// For the owners of the page: the library sends nothing more over it, and watches its end.
  message_socket& socket() const noexcept;
  std::span<std::byte> area() const noexcept;
  /// With the page and the area.
  const shared_memory& memory() const noexcept;
  work_progress& progress() const noexcept;

  /// Never hits another process. Nothing happens if it is gone.
  /// @errors errc::unavailable: the system refuses it
  [[nodiscard]] caf::error kill() const noexcept;

  /// Whether its life line is at its end: then the listener is told soon. What others see of the
  /// worker's end, on sockets of its, they see after this.
  bool has_ended() const noexcept;
  /// What the listener was told; none before.
  std::optional<worker_end> end() const;
  /// Waits until it was reaped; none if that is not before `until`.
  std::optional<worker_exit> wait_exit(time_limit until) const;

private:
  class state;
  explicit worker_process(std::shared_ptr<state> x) noexcept;

  std::shared_ptr<state> state_;
};

} // namespace troupe::detail
