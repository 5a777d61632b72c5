/// The client's side of an operation: completed once; any number of threads can wait for it.
#pragma once

#include <troupe/error.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace troupe::detail {

using clock = std::chrono::steady_clock;

/// Returns now plus `time`, or the end of the clock if the clock cannot represent the sum.
inline clock::time_point from_now(std::chrono::nanoseconds time) noexcept {
  auto now = clock::now();
  return time < clock::time_point::max() - now ? now + time : clock::time_point::max();
}

/// A limit that never expires in practice. Sums with it do not overflow.
inline constexpr std::chrono::hours as_good_as_never{24 * 365};

/// Marks the calling thread as one that must not block: a lane, a callback thread, a worker of
/// CAF's pool.
void forbid_blocking(const char* thread_kind) noexcept;

/// Returns whether the calling thread may block.
bool may_block() noexcept;

/// Marks the calling thread as one that must not block while this object lives.
class no_blocking_scope {
public:
  explicit no_blocking_scope(const char* thread_kind) noexcept;
  ~no_blocking_scope();
  no_blocking_scope(const no_blocking_scope&) = delete;
  no_blocking_scope& operator=(const no_blocking_scope&) = delete;

private:
  const char* before_;
};

/// Returns none if the calling thread may block.
/// @errors errc::would_block: it must not
caf::error check_may_block() noexcept;

/// Completed exactly once, by the first caller of `answer` (INV-1).
class completion : public std::enable_shared_from_this<completion> {
public:
  completion() = default;
  completion(const completion&) = delete;
  completion& operator=(const completion&) = delete;
  virtual ~completion();

  bool completed() const noexcept { return completed_.load(std::memory_order_acquire); }

  /// None on success. Valid only after `completed` has returned true.
  const caf::error& error() const noexcept { return error_; }

  /// Returns the number of the operation; 0 if it was refused before it got one.
  virtual std::uint64_t number() const noexcept { return 0; }

  /// Requests an early end. The result says what happened.
  virtual void cancel() noexcept {}

  /// Blocks until completed. Only for threads that may block.
  void wait() noexcept;
  /// Blocks until completed or `until`. Returns false if `until` came first.
  bool wait_until(clock::time_point until) noexcept;

  /// Calls `listener` on completion: on the completing thread, or at once on this thread if already
  /// completed. The listener must not block or throw.
  void on_answer(std::function<void()> listener);

  /// Completes with `error`; none is success. Returns false if another caller was first.
  bool answer(caf::error error) noexcept;

protected:
  /// Called on the completing thread before the result is visible.
  virtual void before_answer(const caf::error&) noexcept {}
  /// Called on the completing thread after the result is visible.
  virtual void after_answer() noexcept {}

private:
  bool spin() const noexcept;

  std::atomic<bool> completed_{false}; // waiting threads poll it
  std::atomic<bool> waited_for_{false};
  caf::error error_;
  std::mutex mutex_;
  std::condition_variable condition_;
  std::vector<std::function<void()>> listeners_;
  std::atomic<bool> claimed_{false}; // `answer` was called; kept far from `completed_`
};

/// Returns a completion that has already failed with `why`, for a refused request.
std::shared_ptr<completion> refused(caf::error why);

} // namespace troupe::detail
