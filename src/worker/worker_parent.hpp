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
/// sees the parent's end, however it came, this process ends too: no worker is left alone. (The
/// system's own means, PR_SET_PDEATHSIG, would not do: it tells of the end of the thread that
/// started the worker, which may end long before its process.)
class worker_parent {
public:
  using arguments = std::span<char* const>;

  /// The arguments of `main` are those of a worker.
  static bool is_worker(arguments from) noexcept;

  /// Meets the parent, in the socket that the arguments tell of.
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

} // namespace troupe::detail
