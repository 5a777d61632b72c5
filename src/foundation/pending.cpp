#include "foundation/log.hpp"
#include "foundation/never_destroyed.hpp"
#include "foundation/spin.hpp"
#include "foundation/start_thread.hpp"
#include <troupe/detail/user_call.hpp>
#include <troupe/pending.hpp>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <stop_token>
#include <thread>
#include <utility>

namespace troupe::detail {

namespace {

std::atomic<std::int64_t> client_spin_ns{0};

/// An executor with one thread, which starts at the first use.
class callback_thread final : public executor {
public:
  void post(std::function<void()> task) override {
    {
      std::lock_guard lock{mutex_};
      tasks_.push_back(std::move(task));
    }
    begin();
    condition_.notify_one();
  }

  /// Starts the thread. Tasks wait while the system has no thread for them.
  void begin() {
    if (started_.load(std::memory_order_acquire))
      return;
    caf::error error;
    {
      std::lock_guard lock{mutex_};
      if (started_)
        return;
      error = start_detached_thread([this] { run(); }, "for callbacks, which wait for one");
      started_.store(!error, std::memory_order_release);
    }
    if (error)
      log(log_level::error, "callbacks", error);
  }

private:
  void run() {
    forbid_blocking("the callback thread");
    std::unique_lock lock{mutex_};
    while (true) {
      condition_.wait(lock, [this] { return !tasks_.empty(); });
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable condition_;
  std::deque<std::function<void()>> tasks_;
  std::atomic<bool> started_{false}; // under mutex_
};

/// A user's continuation. It runs once, even if an executor takes it and throws nevertheless.
class continuation {
public:
  explicit continuation(std::function<void()> f) : f_(std::move(f)) {}

  void run_once() noexcept {
    if (!ran_.exchange(true))
      call_user_or_log("a callback", f_);
  }

private:
  std::function<void()> f_;
  std::atomic<bool> ran_{false};
};

} // namespace

std::chrono::nanoseconds client_spin() noexcept {
  return std::chrono::nanoseconds{client_spin_ns.load(std::memory_order_relaxed)};
}

void set_client_spin(std::chrono::nanoseconds time) noexcept {
  client_spin_ns.store(time.count(), std::memory_order_relaxed);
}

executor& callback_executor() {
  auto& instance = never_destroyed<callback_thread>(); // callbacks come until the process ends
  instance.begin();                                    // a client starts the thread, not a lane
  return instance;
}

const std::shared_ptr<completion>& no_request() noexcept {
  static const auto* result = new std::shared_ptr<completion>{
      // for static objects of users
      refused(make_error(errc::invalid_argument, "there is no request: this result is empty"))};
  return *result;
}

void continue_on(executor& where, completion& after, std::function<void()> f) {
  after.on_answer([&where, x = std::make_shared<continuation>(std::move(f))] {
    auto task = [x] { x->run_once(); };
    try {
      where.post(task);
    } catch (...) {
      log_exception("an executor, whose task the callback thread runs instead,",
                    std::current_exception());
      callback_executor().post(task);
    }
  });
}

namespace {

struct canceller {
  std::weak_ptr<completion> what;
  void operator()() const {
    if (auto x = what.lock())
      x->cancel();
  }
};

} // namespace

/// The end of a stop callback may wait for its call, so it is not on the completing thread.
void cancel_on(const std::shared_ptr<completion>& what, const std::stop_token& stop) {
  if (!stop.stop_possible() || what->completed())
    return;
  auto callback = std::make_shared<std::stop_callback<canceller>>(stop, canceller{what});
  what->on_answer([x = std::move(callback)]() mutable {
    call_user_or_log("the end of a stop callback",
                     [&] { callback_executor().post([y = std::move(x)] {}); });
  });
}

} // namespace troupe::detail
