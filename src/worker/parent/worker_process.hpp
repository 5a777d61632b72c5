/// A supervised child process, as seen by its parent.
#pragma once

#include "worker/protocol/message_socket.hpp"
#include "worker/protocol/worker_page.hpp"

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
  std::string name;                   ///< argument 0, also in messages; empty: the program
  std::vector<std::string> arguments; ///< after the program's name; `worker_flag` is added
  std::size_t area_bytes = 0;         ///< shared memory for the owners of the page
  /// Limit from the start to the worker's hello.
  std::chrono::nanoseconds hello_limit = std::chrono::seconds{10};
  /// A worker whose beats stand still for longer is killed; 0: never. Time in which this process
  /// itself stood still does not count.
  /// While the system writes a core dump of a worker, its beats stand still and its life line is
  /// held. So it counts as stuck, and the dump is cut. To see the signal of a crash soon, disable
  /// core dumps of workers (RLIMIT_CORE).
  std::chrono::nanoseconds stuck_limit = std::chrono::seconds{1};
  std::chrono::nanoseconds beat_period = std::chrono::milliseconds{5};
  /// A worker that is inside one call (`work_progress`) for longer is killed; 0: never. Time in
  /// which this process itself stood still does not count.
  std::chrono::nanoseconds call_limit{0};
  /// Limit for the end of a worker that has released its life line or closed its socket. After it,
  /// the worker is killed.
  std::chrono::nanoseconds exit_limit = std::chrono::seconds{5};
  /// How long the destructor waits for a killed worker. If a device holds it up in the kernel for
  /// longer, a thread goes on waiting.
  std::chrono::nanoseconds destroy_limit = std::chrono::seconds{10};
  /// Cancels the start, which then fails.
  std::stop_token stop;
};

enum class end_cause : std::uint8_t {
  died,    ///< by itself: a signal, or an exit without releasing the life line
  let_go,  ///< it released its life line on purpose, and is about to end
  hung_up, ///< it closed its socket, though its life line is held
  stuck,   ///< its beats stood still, and it was killed
  busy,    ///< it was inside one call for too long, and was killed
  killed   ///< by its owner
};

enum class noticed_by : std::uint8_t {
  life_line, ///< at once
  socket,    ///< when its files were closed
  process,   ///< when all of it was gone
  heartbeat  ///< it was killed and is still there
};

std::string_view to_string(noticed_by x) noexcept;

/// A worker's end, as known when it is noticed. The process may take time to go. Its resources,
/// device memory too, are free only after it was reaped.
struct worker_end {
  end_cause cause = end_cause::died;
  noticed_by noticed = noticed_by::life_line;
  std::chrono::steady_clock::time_point when;
  std::optional<worker_report> report; ///< from the worker itself
  std::uint32_t call = 0;              ///< of a busy worker: `work_progress::call`
};

/// How a process ended. Both values are unknown if other code has reaped it.
struct worker_exit {
  int status = -1; ///< -1: it did not exit
  int signal = 0;  ///< 0: no signal ended it
};

/// Returns a text such as "status 3" or "signal 9".
std::string to_string(const worker_exit& x);

/// Called once for each worker that was started, in this order, on a watching thread, maybe before
/// `start` has returned. They may destroy the worker; none is called after that. They must not
/// throw, nor block for long.
struct worker_listener {
  std::function<void(const worker_end&)> ended;
  std::function<void(const worker_exit&)> reaped; ///< no zombie is left
};

/// Starts, watches and ends a worker. Needs no handler of SIGCHLD and waits for no other process,
/// so it does not interfere with the program's other children.
/// @thread any
class worker_process {
public:
  /// Starts a worker, and returns when it has said hello (`worker_parent::attach` does that).
  ///
  /// The worker has standard input, output and error of this process, its socket, and no other
  /// descriptor. A standard stream that is closed or close-on-exec here is /dev/null there. All
  /// signals have the default action. The worker is in its own process group, so no signal of a
  /// terminal or for this process's group reaches it. All `program_signals` are blocked until
  /// `worker_parent::attach` ignores them.
  /// @errors errc::invalid_argument: options that can never be valid; errc::unavailable: the
  ///         program cannot be started, ended at once, sent no hello in time, refuses or has
  ///         another version, or the start was cancelled. Nothing of the worker is left.
  static caf::expected<worker_process> start(worker_options options, worker_listener listener = {});

  /// Kills the worker, and waits until it was reaped and its listener has returned. Does not wait
  /// inside a listener.
  ~worker_process();
  worker_process(worker_process&&) noexcept = default;
  worker_process& operator=(worker_process&& other) noexcept;

  pid_t id() const noexcept;
  /// For the owners of the page. The library sends nothing more over it, but watches its end.
  message_socket& socket() const noexcept;
  std::span<std::byte> area() const noexcept;
  /// Returns the memory with the page and the area.
  const shared_memory& memory() const noexcept;
  work_progress& progress() const noexcept;

  /// Kills the worker, never another process. Does nothing if the worker is gone.
  /// @errors errc::unavailable: the system refuses it
  [[nodiscard]] caf::error kill() const noexcept;

  /// Returns true if its life line has ended: the listener is called soon. Others see the end of
  /// the worker's sockets only after this.
  bool has_ended() const noexcept;
  /// Returns the end that the listener was told, if any.
  std::optional<worker_end> end() const;
  /// Waits until the worker was reaped. Returns nothing if that is not before `until`.
  std::optional<worker_exit> wait_exit(time_limit until) const;

private:
  class state;
  explicit worker_process(std::shared_ptr<state> x) noexcept;

  std::shared_ptr<state> state_;
};

} // namespace troupe::detail
