/// The parent of a worker process, as the worker sees it.
#pragma once

#include "worker/message_socket.hpp"
#include "worker/worker_page.hpp"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>

namespace troupe::detail {

/// What a worker ends with whose parent is gone. Nobody is left to see it but the system's log.
inline constexpr int parent_gone_status = 83;

struct worker_parent_options {
  /// For the parent's hello.
  std::chrono::nanoseconds hello_limit = std::chrono::seconds{30};
  /// Called once, on a thread of the library, when the parent is gone or has closed the socket.
  /// When it returns, or `gone_limit` later, the process ends by `_exit`.
  std::function<void()> on_gone;
  std::chrono::nanoseconds gone_limit = std::chrono::milliseconds{500};
};

/// The worker's side of a `worker_process`. A thread holds this process's life line, counts up the
/// beats and watches the socket; another watches the parent's life line. As soon as one of them
/// sees the parent's end, however it came, this process ends too: no worker is left alone. Where
/// nothing has to be done before (`on_gone`), the system kills the worker as well, also a stopped
/// one (PR_SET_PDEATHSIG). It does so when the thread ends that started the worker, which therefore
/// is the one that watches the worker until it is gone.
class worker_parent {
public:
  using arguments = std::span<char* const>;

  /// The arguments of `main` are those of a worker.
  static bool is_worker(arguments from) noexcept;

  /// Meets the parent, in the socket that the arguments tell of. Ignores the `program_signals`.
  /// @errors errc::invalid_argument: no such argument, or a descriptor that is no such socket;
  ///         errc::unavailable: the parent is gone, does not say hello, has another version, or the
  ///         system refuses what is needed. The parent was told, if it is there; the program should
  ///         end.
  static caf::expected<worker_parent> attach(arguments from, worker_parent_options options = {});

  /// Lets go: the parent takes the worker for ended, and the process should end. Not in `on_gone`.
  ~worker_parent();
  worker_parent(worker_parent&&) noexcept;
  worker_parent& operator=(worker_parent&& other) noexcept;

  /// For the owners of the page, as the parent's.
  message_socket& socket() const noexcept;
  std::span<std::byte> area() const noexcept;
  work_progress& progress() const noexcept;

  /// Tells the parent why this process is about to end: its notice of the end carries it. Takes no
  /// memory and no lock. Only the first report counts; what is longer than about 1,000 bytes is
  /// cut.
  /// @thread any; a signal handler too
  void report_failure(std::int32_t code, std::string_view text) const noexcept;

private:
  class state;
  explicit worker_parent(std::unique_ptr<state> x) noexcept;

  std::unique_ptr<state> state_;
};

/// A program that does not begin with `worker_main` would go on as what it is otherwise, where it
/// is started as a worker: it would start workers, which are the same program. Its parent is told.
/// @errors errc::unavailable: this process was started as a worker, and is none
caf::error refuse_in_unmet_worker();
/// `worker_main` has returned to a program that is a worker, and has nothing more to do.
void set_over_as_worker() noexcept;

} // namespace troupe::detail
