/// The queue between threads that log and the log's sink.
#pragma once

#include "foundation/log.hpp"
#include "foundation/log_limit.hpp"

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

namespace troupe::detail {

struct log_entry {
  log_level level = log_level::debug;
  std::string text;
  std::optional<failure> why;
  std::chrono::system_clock::time_point when = std::chrono::system_clock::now();

  std::size_t size_bytes() const noexcept;
};

/// Queues lines. A thread of its own passes them to the sink, so that a sink that blocks stops no
/// other thread. The first line, or the first sink, starts the thread. Without it, the thread that
/// logs passes on the lines that are queued.
/// @invariant The sink is called by one thread at a time.
/// @thread any; never destroyed, since its thread never ends
class log_writer {
public:
  static constexpr std::size_t most_lines = 1000;
  static constexpr std::size_t most_bytes = std::size_t{1} << 20;
  /// The time that threads wait for a blocked sink while the process ends, in total.
  static constexpr std::chrono::milliseconds end_limit{500};

  /// Passes a line to the sink; null: to the default one.
  using deliver_function = void (*)(const log_sink*, const log_entry&) noexcept;

  explicit log_writer(deliver_function deliver) noexcept : deliver_(deliver) {}
  log_writer(const log_writer&) = delete;
  log_writer& operator=(const log_writer&) = delete;

  bool has_sink() const noexcept { return has_sink_.load(); }
  /// Returns whether a line of this kind may be added.
  bool admit(log_kind kind) noexcept;
  /// Adds a line. If there is no room, the line is counted and left out.
  void add(log_entry&& x) noexcept;
  /// Counts a line that could not be made.
  void add_nothing() noexcept;
  bool drain(std::chrono::nanoseconds limit) noexcept;
  /// Passes all lines to the old sink, if it takes them within a second. When the function returns,
  /// the old sink is not called any more, unless it is the caller.
  void replace_sink(std::shared_ptr<const log_sink> x);
  void set_window(std::chrono::nanoseconds x) noexcept;
  /// From now on, a thread that adds a line waits until the sink has it, within `end_limit` in
  /// total: the process may end at once.
  void end() noexcept;

  // For fork: no other thread is inside the writer between `lock` and `unlock`.

  void lock() noexcept { mutex_.lock(); }
  void unlock() noexcept { mutex_.unlock(); }
  /// Returns a writer with the same sink for the child process, without lines and thread. Needs the
  /// lock.
  log_writer* copy_for_child() const;

private:
  using clock = std::chrono::steady_clock;
  using guard = std::unique_lock<std::mutex>;

  void push(log_entry&& x);
  /// Adds lines that say how many were left out, of kinds for which that is due, or of all.
  void push_counts(bool all) noexcept;
  clock::time_point next_due() const noexcept;
  void start_thread_once() noexcept;
  /// Lets the thread, or else the caller, write what is queued.
  void set_off(guard& lock) noexcept;
  void run() noexcept;
  /// Passes all queued lines to the sink, unless another thread does.
  void write_all(guard& lock) noexcept;
  bool wait_written(guard& lock, std::uint64_t number, clock::time_point until) noexcept;
  void wait_at_end(guard& lock) noexcept;

  const deliver_function deliver_;
  std::atomic<bool> has_sink_{false};

  std::mutex mutex_;
  std::condition_variable work_;     ///< for the thread
  std::condition_variable progress_; ///< for threads that wait for the sink
  std::shared_ptr<const log_sink> sink_;
  const log_sink* in_call_ = nullptr;
  bool is_child_ = false; ///< of fork: it gets no thread
  bool has_thread_ = false;
  bool is_writing_ = false;
  bool ends_ = false;
  std::chrono::nanoseconds left_to_wait_{end_limit}; ///< once it ends
  std::deque<log_entry> queue_;
  std::size_t bytes_ = 0; ///< of `queue_`
  std::uint64_t added_ = 0;
  std::uint64_t written_ = 0;
  std::size_t left_out_ = 0; ///< for lack of room, and not yet reported
  std::chrono::nanoseconds window_{log_limit::window};
  std::array<log_limit, log_kind_count> limits_;
};

} // namespace troupe::detail
