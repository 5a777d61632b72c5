#include "foundation/never_destroyed.hpp"
#include "foundation/start_thread.hpp"
#include <troupe/timer.hpp>

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace troupe {

namespace detail {

namespace {

class timer;

/// The timers of the process, by their times, and the thread that ends them. The thread starts with
/// the first timer.
class timer_thread {
public:
  using timers = std::multimap<clock::time_point, std::shared_ptr<timer>>;

  /// Adds a timer, and tells it where it is.
  caf::error add(clock::time_point when, std::shared_ptr<timer> x);
  /// Removes a timer. Does nothing if it is over.
  void remove(timer& x) noexcept;

private:
  void run();

  std::mutex mutex_;
  std::condition_variable earlier_; ///< another timer is the first one
  timers timers_;
  bool started_ = false;
};

class timer final : public completion {
public:
  void cancel() noexcept override {
    if (answer(make_error(errc::cancelled, "the timer was cancelled")))
      never_destroyed<timer_thread>().remove(*this);
  }

private:
  friend class timer_thread;
  timer_thread::timers::iterator place_; // under the thread's mutex, while `waits_`
  bool waits_ = false;                   // the same
};

caf::error timer_thread::add(clock::time_point when, std::shared_ptr<timer> x) {
  std::lock_guard lock{mutex_};
  if (!started_) {
    if (auto error = start_detached_thread([this] { run(); }, "for timers"))
      return error;
    started_ = true;
  }
  auto& added = *x;
  added.place_ = timers_.emplace(when, std::move(x));
  added.waits_ = true;
  if (added.place_ == timers_.begin())
    earlier_.notify_one();
  return {};
}

void timer_thread::remove(timer& x) noexcept {
  std::shared_ptr<timer> last; // its destructor runs without the lock
  std::lock_guard lock{mutex_};
  if (!std::exchange(x.waits_, false))
    return;
  last = std::move(x.place_->second);
  timers_.erase(x.place_);
}

void timer_thread::run() {
  forbid_blocking("the timers' thread");
  std::unique_lock lock{mutex_};
  while (true) {
    if (timers_.empty()) {
      earlier_.wait(lock);
    } else if (const auto next = timers_.begin()->first; clock::now() < next) {
      earlier_.wait_until(lock, next);
    } else {
      auto over = std::move(timers_.begin()->second);
      over->waits_ = false;
      timers_.erase(timers_.begin());
      lock.unlock();
      over->answer({});
      over.reset();
      lock.lock();
    }
  }
}

} // namespace

} // namespace detail

pending<void> after(std::chrono::nanoseconds time) {
  auto result = std::make_shared<detail::timer>();
  if (time <= std::chrono::nanoseconds::zero())
    result->answer({});
  else if (auto error =
               detail::never_destroyed<detail::timer_thread>().add(detail::from_now(time), result))
    result->answer(std::move(error));
  return {std::move(result), nullptr};
}

} // namespace troupe
