/// The answer to a request, now or later.
#pragma once

#include <troupe/detail/completion.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

namespace troupe {

/// Runs continuations.
class executor {
public:
  virtual ~executor() = default;
  /// Runs `task` later, on a thread of the executor; `task` does not throw. If this function
  /// throws, the exception is a line of the log, and the task runs on the callback thread.
  /// @thread any; must not block
  virtual void post(std::function<void()> task) = 0;
};

namespace detail {
/// Where `pending::then` runs continuations if no executor is named: one thread of the process.
executor& callback_executor();

/// Has `where` run `f` once `after` is answered.
void continue_on(executor& where, completion& after, std::function<void()> f);
} // namespace detail

/// The answer to a request: a `T`, or why there is none. Copies share the same answer. Dropping it
/// leaves the operation running; its result is lost, its memory stays alive until it is over
/// (INV-4). One that was moved from must not be used.
/// @thread any, several at once
template <class T> class pending {
public:
  /// For the library: `value` lives in the completion and is set when that succeeds.
  pending(std::shared_ptr<detail::completion> completion, std::shared_ptr<T> value)
      : completion_(std::move(completion)), value_(std::move(value)) {}

  /// A request that was refused.
  explicit pending(caf::error why) : completion_(detail::refused(std::move(why))) {}

  bool ready() const noexcept { return completion_->answered(); }

  /// Number of the operation, as errors name it; 0 if the request was refused at once.
  std::uint64_t number() const noexcept { return completion_->number(); }

  /// Blocks until answered; at the latest a few milliseconds after the request's deadline.
  /// @errors errc::would_block on a lane, in a callback and in an actor of CAF's pool: the
  ///         operation goes on
  caf::expected<T> wait() const {
    if (!ready()) {
      if (auto refused = detail::check_may_block(); refused)
        return refused;
      completion_->wait();
    }
    return result();
  }

  /// Blocks until answered or `until`; true when answered.
  /// @errors errc::would_block, as `wait`
  caf::expected<bool> wait_until(std::chrono::steady_clock::time_point until) const {
    if (!ready())
      if (auto refused = detail::check_may_block(); refused)
        return refused;
    return completion_->wait_until(until);
  }

  caf::expected<bool> wait_for(std::chrono::nanoseconds time) const {
    return wait_until(detail::from_now(time));
  }

  /// The answer, without waiting for it.
  /// @errors errc::unavailable, too: it is not there yet (`ready`); the operation goes on
  caf::expected<T> result() const {
    if (!ready())
      return make_error(errc::unavailable, "the request is not answered yet");
    if (auto& error = completion_->error(); error)
      return error;
    if constexpr (std::is_void_v<T>)
      return {};
    else
      return *value_;
  }

  /// Calls `f(caf::expected<T>)` when answered, on the callback thread. An exception that `f`
  /// throws is a line of the log.
  template <class F> void then(F f) const { then(detail::callback_executor(), std::move(f)); }

  /// Calls `f(caf::expected<T>)` when answered, on `where`, which must outlive that.
  template <class F> void then(executor& where, F f) const {
    detail::continue_on(where, *completion_,
                        [self = *this, f = std::move(f)]() mutable { f(self.result()); });
  }

  /// Takes the request back. If no part of it was issued, it is as if it had never been made: it
  /// never runs, and later requests on its buffers, also those that wait already, come behind what
  /// was before it. Otherwise it is answered now and runs on, its buffers busy until it is over.
  /// Either way the answer is `errc::cancelled`, unless the operation had been answered before; its
  /// text and the ranks' states say which of the two it was.
  void cancel() const { completion_->cancel(); }

private:
  std::shared_ptr<detail::completion> completion_;
  std::shared_ptr<T> value_;
};

} // namespace troupe
