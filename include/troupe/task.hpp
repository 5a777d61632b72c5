/// Coroutines that await requests.
///
/// `co_await` of a `pending<T>` gives a `caf::expected<T>`, in any coroutine. In a `task` it goes
/// on where the task runs, and `co_await value_of(x)` gives the `T` itself: if there is an error
/// instead, it ends the task with that error.
#pragma once

#include <troupe/detail/user_call.hpp>
#include <troupe/pending.hpp>

#include <coroutine>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <type_traits>
#include <utility>

namespace troupe {

template <class T = void> class task;

namespace detail {

/// A task that was started, with the tasks that it awaits. Completed when it ends.
class coroutine_run : public completion {
public:
  coroutine_run(std::shared_ptr<executor> where, const std::stop_token& stop);
  ~coroutine_run() override;

  void cancel() noexcept override;
  std::stop_token stop_token() const noexcept { return stop_.get_token(); }

  /// Begins with `root`, on the executor. Takes its frame.
  void begin(std::coroutine_handle<> root);
  /// Calls `next` on the executor when `after` is completed, and resumes what it returns. The
  /// coroutine may run, and end, before this function returns.
  void resume_after(completion& after, std::function<std::coroutine_handle<>()> next);
  /// Destroys the frame, and completes with `error`.
  void end(const caf::error& error) noexcept;

private:
  class step;
  static void abandon(std::shared_ptr<coroutine_run> what) noexcept;

  std::shared_ptr<executor> where_;     ///< until the end, too
  std::shared_ptr<coroutine_run> self_; ///< until the end
  std::stop_source stop_;
  std::optional<std::stop_callback<std::function<void()>>> outer_; ///< requests a stop of `stop_`
  std::coroutine_handle<> root_;
};

/// The run of a task with a result, for its `pending`.
template <class T> class run_with_value final : public coroutine_run {
public:
  using coroutine_run::coroutine_run;
  ~run_with_value() override {
    if (has_value_)
      std::destroy_at(place());
  }

  template <class U> void set(U&& x) {
    std::construct_at(place(), std::forward<U>(x));
    has_value_ = true;
  }
  T* place() noexcept { return reinterpret_cast<T*>(bytes_); }

private:
  alignas(T) std::byte bytes_[sizeof(T)]{};
  bool has_value_ = false;
};

template <> class run_with_value<void> final : public coroutine_run {
public:
  using coroutine_run::coroutine_run;
  void* place() noexcept { return nullptr; }
};

/// Returns `why`, or if it is none, an error that says so.
/// @errors errc::invalid_argument
caf::error real_error(caf::error why) noexcept;

/// Returns an error with the text of the exception that is being handled.
/// @errors errc::unavailable
caf::error thrown_by_task();

template <class T> struct required_pending {
  pending<T> what;
};
template <class T> struct required_task {
  task<T> what;
};
struct task_failure {
  caf::error why;
};
struct wanted_stop_token {};

template <class T> struct plain_awaiter;
template <class T> class pending_awaiter;
template <class T> class required_pending_awaiter;
template <class T, bool required> class task_awaiter;
struct failure_awaiter;
struct stop_token_awaiter;

template <class T> inline constexpr bool has_own_transform = false;
template <class T> inline constexpr bool has_own_transform<pending<T>> = true;
template <class T> inline constexpr bool has_own_transform<task<T>> = true;
template <class T> inline constexpr bool has_own_transform<required_pending<T>> = true;
template <class T> inline constexpr bool has_own_transform<required_task<T>> = true;
template <class T> inline constexpr bool has_own_transform<plain_awaiter<T>> = true;
template <> inline constexpr bool has_own_transform<task_failure> = true;
template <> inline constexpr bool has_own_transform<wanted_stop_token> = true;

/// A task that awaits another one.
class awaiting_task {
public:
  /// Returns what to resume now that the other one is over.
  virtual std::coroutine_handle<> next() noexcept = 0;

protected:
  ~awaiting_task() = default;
};

/// The part of a promise that does not depend on the type of the result.
class task_promise {
public:
  std::suspend_always initial_suspend() const noexcept { return {}; }

  /// Resumes the task that awaits this one, or ends the run.
  struct final_awaiter {
    bool await_ready() const noexcept { return false; }
    template <class Promise>
    std::coroutine_handle<> await_suspend(std::coroutine_handle<Promise> x) const noexcept {
      return x.promise().over();
    }
    void await_resume() const noexcept {}
  };
  final_awaiter final_suspend() const noexcept { return {}; }

  template <class T> pending_awaiter<T> await_transform(pending<T> x) {
    return {std::move(x), *this};
  }
  template <class T> required_pending_awaiter<T> await_transform(required_pending<T> x) {
    return {std::move(x.what), *this};
  }
  template <class T> task_awaiter<T, false> await_transform(task<T> x);
  template <class T> task_awaiter<T, true> await_transform(required_task<T> x);
  failure_awaiter await_transform(task_failure x);
  stop_token_awaiter await_transform(wanted_stop_token);
  /// A task goes on where it runs.
  template <class T> void await_transform(plain_awaiter<T>) = delete;
  template <class X>
    requires(!has_own_transform<std::remove_cvref_t<X>>)
  X&& await_transform(X&& x) const noexcept {
    return std::forward<X>(x);
  }

  coroutine_run& run() const noexcept { return *run_; }
  void be_awaited_by(awaiting_task& x, coroutine_run& run) noexcept {
    awaiting_ = &x;
    run_ = &run;
  }
  void be_root_of(coroutine_run& run) noexcept { run_ = &run; }

  /// Ends the task with an error, while it is suspended. Returns what to resume.
  std::coroutine_handle<> fail(caf::error why) noexcept {
    set_error(std::move(why));
    return over();
  }
  /// Ends the run, or returns what to resume. The frame of this task may be gone then.
  virtual std::coroutine_handle<> over() noexcept = 0;

protected:
  ~task_promise() = default;
  virtual void set_error(caf::error why) noexcept = 0;

  awaiting_task* awaiting_ = nullptr; // null: this is the root of the run
  coroutine_run* run_ = nullptr;      // owns the frame of its root, which owns the others
};

template <class T> class task_result : public task_promise {
public:
  template <class U = T> void return_value(U&& x) {
    result_.emplace(std::forward<U>(x));
    if (!*result_ && !result_->error())
      set_error({});
  }

  /// Returns the result. Once.
  caf::expected<T> take() { return std::move(*result_); }
  caf::error error() const { return *result_ ? caf::error{} : result_->error(); }

protected:
  ~task_result() = default;
  void set_error(caf::error why) noexcept override { result_.emplace(real_error(std::move(why))); }

private:
  std::optional<caf::expected<T>> result_;
};

template <> class task_result<void> : public task_promise {
public:
  void return_void() noexcept {}

  caf::expected<void> take() {
    if (why_)
      return why_;
    return {};
  }
  const caf::error& error() const noexcept { return why_; }

protected:
  ~task_result() = default;
  void set_error(caf::error why) noexcept override { why_ = real_error(std::move(why)); }

private:
  caf::error why_;
};

/// Returns the value of `x`, which is no error.
template <class T> T value_in(caf::expected<T> x) {
  if constexpr (!std::is_void_v<T>)
    return std::move(*x);
}

} // namespace detail

/// A coroutine that has not begun. `start` starts it; another task may await it, and then it runs
/// as a part of that one. `co_return` takes a `T` or a `caf::error`; of a `task<void>`, nothing. An
/// exception that leaves it becomes errc::unavailable, with its text.
///
/// Beware of parameters: a coroutine keeps copies of those that it takes by value, and references
/// to the others. A lambda's captures are gone with the lambda.
template <class T> class [[nodiscard]] task {
public:
  class promise_type final : public detail::task_result<T> {
  public:
    task get_return_object() {
      return task{std::coroutine_handle<promise_type>::from_promise(*this)};
    }
    void unhandled_exception() { this->set_error(detail::thrown_by_task()); }
    std::coroutine_handle<> over() noexcept override {
      if (this->awaiting_ != nullptr)
        return this->awaiting_->next();
      auto& run = static_cast<detail::run_with_value<T>&>(*this->run_);
      const auto why = detail::call_user(errc::unavailable, "the move of a result", [&] {
        auto result = this->take();
        if constexpr (!std::is_void_v<T>)
          if (result)
            run.set(std::move(*result));
        return result ? caf::error{} : result.error();
      });
      run.end(why);
      return std::noop_coroutine();
    }
  };

  task(task&& x) noexcept : handle_(std::exchange(x.handle_, {})) {}
  task& operator=(task&& x) noexcept {
    std::swap(handle_, x.handle_);
    return *this;
  }
  ~task() {
    if (handle_)
      handle_.destroy();
  }

  /// Internal.
  std::coroutine_handle<promise_type> handle() const noexcept { return handle_; }
  std::coroutine_handle<promise_type> release() noexcept { return std::exchange(handle_, {}); }

private:
  explicit task(std::coroutine_handle<promise_type> x) : handle_(x) {}

  std::coroutine_handle<promise_type> handle_;
};

/// Starts a task, on `where`. Returns its result. A stop can be requested by `stop` or
/// `pending::cancel` of the result. Then all that the task awaits, now or later, is cancelled: the
/// task gets errc::cancelled for it, and decides. If the executor drops what it was to run, the
/// task ends there (errc::cancelled).
/// @errors errc::unavailable: the task threw; errc::cancelled; errc::invalid_argument: no executor,
///         or a moved-from task; and what the task ends with
template <class T>
pending<T> start(task<T> what, std::shared_ptr<executor> where, std::stop_token stop = {}) {
  if (!where || !what.handle())
    return pending<T>{make_error(errc::invalid_argument,
                                 where ? "the task is empty" : "a task needs an executor")};
  auto run = std::make_shared<detail::run_with_value<T>>(std::move(where), stop);
  what.handle().promise().be_root_of(*run);
  run->begin(what.release());
  return {run, std::shared_ptr<T>{run, run->place()}};
}

/// The same on an executor that lives until the task is over and `executor::post` has returned.
template <class T> pending<T> start(task<T> what, executor& where, std::stop_token stop = {}) {
  return start(std::move(what), std::shared_ptr<executor>{std::shared_ptr<void>{}, &where},
               std::move(stop));
}

/// The same on the callback thread.
template <class T> pending<T> start(task<T> what, std::stop_token stop = {}) {
  return start(std::move(what), detail::callback_executor(), std::move(stop));
}

/// In a task: `co_await value_of(x)` gives the value of `x`, a `pending` or a task; or else it ends
/// this task with the error of `x`.
template <class T> detail::required_pending<T> value_of(pending<T> x) { return {std::move(x)}; }
template <class T> detail::required_task<T> value_of(task<T> x) { return {std::move(x)}; }

/// In a task: `co_await end_with(why)` ends it with an error.
inline detail::task_failure end_with(caf::error why) { return {std::move(why)}; }

/// In a task: `co_await stop_token_of_task()` gives the token of its run.
inline detail::wanted_stop_token stop_token_of_task() { return {}; }

namespace detail {

template <class T> struct cancels {
  pending<T> what;
  void operator()() const {
    const auto keep = what; // the coroutine, and this object in it, may be gone within the call
    keep.cancel();
  }
};

template <class T> class pending_awaiter {
public:
  pending_awaiter(pending<T> x, task_promise& of) : awaited_(std::move(x)), of_(of) {}

  bool await_ready() const noexcept { return awaited_.ready(); }
  void await_suspend(std::coroutine_handle<> x) {
    resume_later([x] { return x; });
  }
  caf::expected<T> await_resume() {
    stop_.reset();
    return awaited_.result();
  }

protected:
  template <class F> void resume_later(F next) {
    stop_.emplace(of_.run().stop_token(), cancels<T>{awaited_}); // may cancel it at once
    of_.run().resume_after(*pending_access::completion_of(awaited_), std::move(next));
  }
  const pending<T>& awaited() const noexcept { return awaited_; }
  task_promise& promise() const noexcept { return of_; }

private:
  pending<T> awaited_;
  task_promise& of_;
  std::optional<std::stop_callback<cancels<T>>> stop_;
};

template <class T> class required_pending_awaiter : pending_awaiter<T> {
public:
  using pending_awaiter<T>::pending_awaiter;

  bool await_ready() const { return this->awaited().ready() && !this->awaited().error(); }
  std::coroutine_handle<> await_suspend(std::coroutine_handle<> x) {
    if (this->awaited().ready())
      return next(x);
    this->resume_later([this, x] { return next(x); });
    return std::noop_coroutine();
  }
  T await_resume() { return value_in(pending_awaiter<T>::await_resume()); }

private:
  std::coroutine_handle<> next(std::coroutine_handle<> x) const noexcept {
    auto why = this->awaited().error();
    return why ? this->promise().fail(std::move(why)) : x;
  }
};

template <class T, bool required> class task_awaiter final : awaiting_task {
public:
  task_awaiter(task<T> x, task_promise& of) : awaited_(std::move(x)), of_(of) {}

  bool await_ready() const noexcept { return false; }
  std::coroutine_handle<> await_suspend(std::coroutine_handle<> x) noexcept {
    awaiting_ = x;
    awaited_.handle().promise().be_awaited_by(*this, of_.run());
    return awaited_.handle();
  }
  auto await_resume() {
    if constexpr (required)
      return value_in(awaited_.handle().promise().take());
    else
      return awaited_.handle().promise().take();
  }

private:
  std::coroutine_handle<> next() noexcept override {
    if constexpr (required)
      if (caf::error why = awaited_.handle().promise().error(); why)
        return of_.fail(std::move(why));
    return awaiting_;
  }

  task<T> awaited_;
  task_promise& of_;
  std::coroutine_handle<> awaiting_;
};

struct failure_awaiter {
  caf::error why;
  task_promise& of;

  bool await_ready() const noexcept { return false; }
  std::coroutine_handle<> await_suspend(std::coroutine_handle<>) { return of.fail(std::move(why)); }
  void await_resume() const noexcept {}
};

struct stop_token_awaiter {
  task_promise& of;

  bool await_ready() const noexcept { return true; }
  void await_suspend(std::coroutine_handle<>) const noexcept {}
  std::stop_token await_resume() const noexcept { return of.run().stop_token(); }
};

template <class T> task_awaiter<T, false> task_promise::await_transform(task<T> x) {
  return {std::move(x), *this};
}
template <class T> task_awaiter<T, true> task_promise::await_transform(required_task<T> x) {
  return {std::move(x.what), *this};
}
inline failure_awaiter task_promise::await_transform(task_failure x) {
  return {std::move(x.why), *this};
}
inline stop_token_awaiter task_promise::await_transform(wanted_stop_token) { return {*this}; }

/// Resumes other coroutines than tasks.
template <class T> struct plain_awaiter {
  pending<T> awaited;
  executor& where;

  bool await_ready() const noexcept { return awaited.ready(); }
  void await_suspend(std::coroutine_handle<> x) const {
    continue_on(where, *pending_access::completion_of(awaited), [x] { x.resume(); });
  }
  caf::expected<T> await_resume() const { return awaited.result(); }
};

} // namespace detail

/// `co_await` in coroutines that are no tasks. They go on on the callback thread.
template <class T> detail::plain_awaiter<T> operator co_await(pending<T> x) {
  return {std::move(x), detail::callback_executor()};
}

/// The same on an executor, which must live until then.
template <class T> detail::plain_awaiter<T> resume_on(executor& where, pending<T> x) {
  return {std::move(x), where};
}

} // namespace troupe
