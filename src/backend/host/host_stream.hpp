/// A stream of the host backend: an in-order queue with a thread of its own.
#pragma once

#include "backend/host/host_transport.hpp"

#include <caf/error.hpp>
#include <caf/expected.hpp>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <variant>
#include <vector>

namespace troupe::detail {

/// The number of recorded events that a stream has reached. It may outlive the stream.
/// @thread any
class stream_progress {
public:
  bool reached(std::uint64_t position) const noexcept;

  void advance(std::uint64_t position) noexcept;

  /// Blocks until `position` is reached.
  void wait(std::uint64_t position) noexcept;
  /// Same, but also returns when `cancelled` is set and `interrupt` is called.
  void wait(std::uint64_t position, const std::atomic<bool>& cancelled) noexcept;

  void interrupt() noexcept;

private:
  std::atomic<std::uint64_t> reached_{0};
  std::mutex mutex_;
  std::condition_variable advanced_;
};

/// A position in a stream, as recorded by an event. Without a stream it counts as reached.
struct stream_position {
  std::shared_ptr<stream_progress> progress;
  std::uint64_t position = 0;

  bool reached() const noexcept { return !progress || progress->reached(position); }
};

struct copy_command {
  void* target;
  const void* source;
  std::size_t size_bytes;
};

struct fill_command {
  void* target;
  std::array<std::byte, 16> pattern; ///< its first `pattern_bytes`
  std::size_t pattern_bytes;
  std::size_t count;
};

struct call_command {
  void (*function)(void*);
  void* argument;
};

struct free_command {
  void* memory;
};

struct record_command {
  std::uint64_t position;
};

struct wait_command {
  stream_position until;
};

struct wait_word_command {
  const std::atomic<std::uint64_t>* word;
  std::uint64_t at_least;
};

struct collective_command {
  std::shared_ptr<host_transport> transport;
  int rank;
  std::uint64_t sequence;
  std::vector<host_call> calls;
};

using stream_command =
    std::variant<copy_command, fill_command, call_command, free_command, record_command,
                 wait_command, wait_word_command, collective_command>;

class host_stream : public std::enable_shared_from_this<host_stream> {
public:
  /// `completed` is called on the stream's thread after each recorded event.
  explicit host_stream(std::shared_ptr<const std::function<void()>> completed) noexcept;

  host_stream(const host_stream&) = delete;
  host_stream& operator=(const host_stream&) = delete;

  /// @thread any
  /// @errors errc::unavailable: no thread can be started; nothing enqueued
  [[nodiscard]] caf::error enqueue(stream_command command) noexcept;

  /// Enqueues an event.
  /// @thread any
  /// @errors as `enqueue`
  [[nodiscard]] caf::expected<stream_position> record() noexcept;

  /// Accepts no more commands. The thread ends after the queued ones.
  void close() noexcept;

  /// As `close`, but interrupts what the stream waits for. From now on only its records and frees
  /// run. A communicator with a collective in the stream ends.
  void cancel() noexcept;

  /// Returns true when the stream is closed and its thread has nothing left to do.
  bool finished() const noexcept;

  /// Waits for the thread to end, unless the caller is that thread. Called after `close` or
  /// `cancel`.
  void join() noexcept;

private:
  caf::error start() noexcept;
  void push(std::unique_lock<std::mutex> lock, stream_command&& command) noexcept;
  void run() noexcept;
  void execute(stream_command& command) noexcept;
  void wait(const stream_position& until) noexcept;
  void serve(const collective_command& command) noexcept;

  const std::shared_ptr<const std::function<void()>> completed_;
  std::shared_ptr<stream_progress> progress_ = std::make_shared<stream_progress>();
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<stream_command> queued_;
  /// Used by the thread only. LeakSanitizer may miss it on the stack of a thread that never ends.
  std::vector<stream_command> running_;
  std::uint64_t recorded_ = 0;
  bool idle_ = false;
  bool closed_ = false;
  bool finished_ = false;
  std::atomic<bool> cancelled_{false};
  std::shared_ptr<host_transport> serving_;      ///< set while it may wait for other ranks
  std::shared_ptr<stream_progress> waiting_for_; ///< another stream, if it waits for one
  std::thread thread_;
};

/// An event of the host backend: the stream position that it recorded last.
/// @thread any
class host_event {
public:
  void set(stream_position x) noexcept;
  stream_position get() const noexcept;

private:
  mutable std::mutex mutex_;
  stream_position recorded_;
};

} // namespace troupe::detail
