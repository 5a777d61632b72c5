/// Requests as senders of stdexec (https://github.com/NVIDIA/stdexec), the proposal P2300. The
/// program provides stdexec; troupe/troupe.hpp does not include this header.
#pragma once

#include <troupe/pending.hpp>

#include <stdexec/execution.hpp>

#include <optional>
#include <type_traits>
#include <utility>

namespace troupe {

namespace detail {

template <class T, class Receiver> class pending_operation {
public:
  using operation_state_concept = stdexec::operation_state_t;

  pending_operation(pending<T> what, executor& where, Receiver to)
      : what_(std::move(what)), where_(where), to_(std::move(to)) {}
  pending_operation(pending_operation&&) = delete;

  void start() & noexcept {
    if (what_.ready())
      return finish();
    try {
      stop_.emplace(stdexec::get_stop_token(stdexec::get_env(to_)), canceller{what_});
      continue_on(where_, *pending_access::completion_of(what_), [this] { finish(); });
    } catch (...) { // no memory
      stop_.reset();
      stdexec::set_error(std::move(to_), make_error(errc::out_of_memory, "to await a request"));
    }
  }

private:
  struct canceller {
    pending<T> what;
    void operator()() const noexcept {
      const auto keep = what; // the operation, and this object in it, may be gone within the call
      keep.cancel();
    }
  };
  using stop_token = stdexec::stop_token_of_t<stdexec::env_of_t<Receiver>>;

  void finish() noexcept {
    stop_.reset();
    auto result = what_.result();
    if (!result) {
      auto why = result.error();
      const auto stop = stdexec::get_stop_token(stdexec::get_env(to_));
      if (stop.stop_requested() && code_of(why) == errc::cancelled)
        stdexec::set_stopped(std::move(to_));
      else
        stdexec::set_error(std::move(to_), std::move(why));
    } else if constexpr (std::is_void_v<T>)
      stdexec::set_value(std::move(to_));
    else
      stdexec::set_value(std::move(to_), std::move(*result));
  }

  pending<T> what_;
  executor& where_;
  Receiver to_;
  std::optional<stdexec::stop_callback_for_t<stop_token, canceller>> stop_;
};

template <class T> struct value_signature {
  using type = stdexec::set_value_t(T);
};
template <> struct value_signature<void> {
  using type = stdexec::set_value_t();
};

template <class T> class pending_sender {
public:
  using sender_concept = stdexec::sender_t;
  using completion_signatures =
      stdexec::completion_signatures<typename value_signature<T>::type,
                                     stdexec::set_error_t(caf::error), stdexec::set_stopped_t()>;

  pending_sender(pending<T> what, executor& where) : what_(std::move(what)), where_(&where) {}

  template <stdexec::receiver Receiver> pending_operation<T, Receiver> connect(Receiver to) const {
    return {what_, *where_, std::move(to)};
  }

private:
  pending<T> what_;
  executor* where_;
};

} // namespace detail

/// Returns a sender of the result: it completes with the value, or with a `caf::error`. If the
/// receiver requests a stop, the request is cancelled, and if that comes in time, the sender
/// completes as stopped. The request runs already; connecting the sender again gives the same
/// result again. It completes on the callback thread, or at once if the result is there.
template <class T> detail::pending_sender<T> as_sender(pending<T> x) {
  return {std::move(x), detail::callback_executor()};
}

/// The same on an executor, which must live until then.
template <class T> detail::pending_sender<T> as_sender(pending<T> x, executor& where) {
  return {std::move(x), where};
}

} // namespace troupe
