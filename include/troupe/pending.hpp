/// The result of a request, available now or later.
#pragma once

#include <troupe/detail/completion.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <stop_token>
#include <type_traits>
#include <utility>

namespace troupe {

/// An interface for threads that run continuations.
class executor {
public:
  virtual ~executor() = default;
  /// Runs `task` later, on a thread of the executor; `task` does not throw. If this function
  /// throws, the exception is logged, and the task runs on the callback thread.
  /// @thread any; must not block
  virtual void post(std::function<void()> task) = 0;
};

namespace detail {
/// Returns the completion of a `pending` without a request.
const std::shared_ptr<completion>& no_request() noexcept;

/// Returns the executor of `pending::then` if no other is named: one thread of the process.
executor& callback_executor();

/// Runs `f` on `where` once `after` is completed.
void continue_on(executor& where, completion& after, std::function<void()> f);

/// Cancels `what` when `stop` is requested, unless it is completed then.
void cancel_on(const std::shared_ptr<completion>& what, const std::stop_token& stop);

struct pending_access;
} // namespace detail

/// The result of a request: a `T`, or an error. Copies share the same result. If all copies are
/// dropped, the operation continues: its result is lost, and its memory stays alive until it is
/// over (INV-4). One without a request, default-constructed or moved-from, has failed with
/// errc::invalid_argument.
/// @thread any, several at once
template <class T> class pending {
public:
  pending() = default;

  /// Internal: `value` lives in the completion and is set when the completion succeeds.
  pending(std::shared_ptr<detail::completion> completion, std::shared_ptr<T> value)
      : completion_(std::move(completion)), value_(std::move(value)) {}

  /// Makes the result of a refused request.
  explicit pending(caf::error why) : completion_(detail::refused(std::move(why))) {}

  bool ready() const noexcept { return get()->completed(); }

  /// Returns the error; none if there is none, or the request is not answered yet.
  caf::error error() const { return ready() ? get()->error() : caf::error{}; }

  /// Returns the number of the operation, as in errors; 0 if the request was refused at once.
  std::uint64_t number() const noexcept { return get()->number(); }

  /// Blocks until the request completes, at the latest a few milliseconds after its deadline, if it
  /// has one.
  /// @errors errc::would_block on a lane, in a callback and in an actor of CAF's pool: the
  ///         operation continues
  caf::expected<T> wait() const {
    if (!ready()) {
      if (auto refused = detail::check_may_block(); refused)
        return refused;
      get()->wait();
    }
    return result();
  }

  /// Blocks until the request completes or `until`. Returns true if it has completed.
  /// @errors errc::would_block, as `wait`
  caf::expected<bool> wait_until(std::chrono::steady_clock::time_point until) const {
    if (!ready())
      if (auto refused = detail::check_may_block(); refused)
        return refused;
    return get()->wait_until(until);
  }

  caf::expected<bool> wait_for(std::chrono::nanoseconds time) const {
    return wait_until(detail::from_now(time));
  }

  /// Returns the result without waiting for it.
  /// @errors errc::unavailable, too: it is not there yet (`ready`); the operation continues
  caf::expected<T> result() const {
    if (!ready())
      return make_error(errc::unavailable, "the request is not answered yet");
    if (auto& error = get()->error(); error)
      return error;
    if constexpr (std::is_void_v<T>)
      return {};
    else
      return *value_;
  }

  /// Calls `f(caf::expected<T>)` on completion, on the callback thread; logs an exception of `f`.
  template <class F> void then(F f) const { then(detail::callback_executor(), std::move(f)); }

  /// Calls `f(caf::expected<T>)` on completion, on `where`, which must live until then.
  template <class F> void then(executor& where, F f) const {
    detail::continue_on(where, *get(),
                        [self = *this, f = std::move(f)]() mutable { f(self.result()); });
  }

  /// The same on an executor that is kept until then, such as that of `executor_of`; not null.
  template <class F> void then(std::shared_ptr<executor> where, F f) const {
    auto& on = *where;
    then(on, [where = std::move(where), f = std::move(f)](caf::expected<T> result) mutable {
      f(std::move(result));
    });
  }

  /// Cancels the request. If no part of it was issued, it is as if it had never been made: it never
  /// runs, and later requests on its buffers, even those that already wait, come directly behind
  /// the requests before it. Otherwise it completes now, but its work continues, and its buffers
  /// are busy until the work is over. In both cases the result is `errc::cancelled`, unless the
  /// operation had completed before. The text and the states of the ranks say which case it was.
  void cancel() const { get()->cancel(); }

  /// Cancels the request when `stop` is requested; at once if it is already. Returns this result.
  pending cancel_on(const std::stop_token& stop) const {
    detail::cancel_on(get(), stop);
    return *this;
  }

private:
  friend struct detail::pending_access;

  const std::shared_ptr<detail::completion>& get() const noexcept {
    return completion_ ? completion_ : detail::no_request();
  }

  std::shared_ptr<detail::completion> completion_;
  std::shared_ptr<T> value_;
};

namespace detail {
struct pending_access {
  template <class T>
  static const std::shared_ptr<completion>& completion_of(const pending<T>& x) noexcept {
    return x.get();
  }
  template <class T> static const std::shared_ptr<T>& value_of(const pending<T>& x) noexcept {
    return x.value_;
  }
};
} // namespace detail

} // namespace troupe
