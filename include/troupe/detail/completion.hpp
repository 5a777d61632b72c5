/// The client's side of an operation: answered once, waited for by anybody.
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

/// `time` from now on; what the clock cannot count to is its end.
inline clock::time_point from_now(std::chrono::nanoseconds time) noexcept {
  auto now = clock::now();
  return time < clock::time_point::max() - now ? now + time : clock::time_point::max();
}

/// A limit of so long never comes, and can be counted with.
inline constexpr std::chrono::hours as_good_as_never{24 * 365};

/// Marks the calling thread as one that must not block: a lane, a callback thread, a worker of
/// CAF's pool.
void forbid_blocking(const char* thread_kind) noexcept;

/// May the calling thread block?
bool may_block() noexcept;

/// Makes the calling thread one that must not block while this lives.
class no_blocking_scope {
public:
  explicit no_blocking_scope(const char* thread_kind) noexcept;
  ~no_blocking_scope();
  no_blocking_scope(const no_blocking_scope&) = delete;
  no_blocking_scope& operator=(const no_blocking_scope&) = delete;

private:
  const char* before_;
};

/// None if the calling thread may block.
/// @errors errc::would_block
caf::error check_may_block() noexcept;

/// Answered exactly once, by whoever claims it first (INV-1).
class completion : public std::enable_shared_from_this<completion> {
public:
  completion() = default;
  completion(const completion&) = delete;
  completion& operator=(const completion&) = delete;
  virtual ~completion();

  bool answered() const noexcept { return answered_.load(std::memory_order_acquire); }

  /// None on success. Only after `answered`.
  const caf::error& error() const noexcept { return error_; }

  /// Number of the operation; 0 if it was refused before it got one.
  virtual std::uint64_t number() const noexcept { return 0; }

  /// Asks for an early end; the answer tells what came of it.
  virtual void cancel() noexcept {}

  /// Waits until answered. The thread may block.
  void wait() noexcept;
  /// False when `until` came first.
  bool wait_until(clock::time_point until) noexcept;

  /// Calls `listener` once answered, on the answering thread, or at once on this one. It must not
  /// block and not throw.
  void on_answer(std::function<void()> listener);

  /// Answers; false if somebody else did. `error` none is success.
  bool answer(caf::error error) noexcept;

protected:
  /// Called by the one that answers, before the answer can be seen.
  virtual void before_answer(const caf::error&) noexcept {}
  /// The same when it can be seen.
  virtual void after_answer() noexcept {}

private:
  bool spin() const noexcept;

  std::atomic<bool> answered_{false}; // who waits looks at it all the time
  std::atomic<bool> waited_for_{false};
  caf::error error_;
  std::mutex mutex_;
  std::condition_variable condition_;
  std::vector<std::function<void()>> listeners_;
  std::atomic<bool> claimed_{false}; // somebody answers, or did; far from the word above
};

/// A completion that is answered from the start: a request that was refused.
std::shared_ptr<completion> refused(caf::error why);

} // namespace troupe::detail
