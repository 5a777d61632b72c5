#include "foundation/background.hpp"

#include "foundation/start_thread.hpp"

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <system_error>
#include <utility>

namespace troupe::detail {

struct background::shared {
  std::mutex mutex;
  std::condition_variable idle;
  std::condition_variable for_spare;
  std::deque<std::function<void()>> waiting;
  std::size_t running = 0; ///< and waiting
  bool over = false;

  void work(std::unique_lock<std::mutex>& lock) {
    while (!waiting.empty()) {
      auto job = std::move(waiting.front());
      waiting.pop_front();
      lock.unlock();
      job();
      job = nullptr;
      lock.lock();
      --running;
      idle.notify_all();
    }
  }
  void wait_as_spare() {
    for (std::unique_lock lock{mutex}; !over;) {
      for_spare.wait(lock, [this] { return over || !waiting.empty(); });
      work(lock);
    }
  }
  void end() {
    std::lock_guard lock{mutex};
    over = true;
    for_spare.notify_one();
  }
};

background::background() {
  auto state = std::make_shared<shared>();
  if (const int code = try_detached_thread([state] { state->wait_as_spare(); }))
    throw std::system_error{code, std::generic_category(), "pthread_create"};
  shared_.reset(state.get(), [state](shared*) { state->end(); });
}

bool background::wait_idle(fair_limit& limit) noexcept {
  std::unique_lock lock{shared_->mutex};
  return limit.wait(shared_->idle, lock, [this] { return shared_->running == 0; });
}

void background::run(std::function<void()> job) {
  {
    std::lock_guard lock{shared_->mutex};
    ++shared_->running;
    shared_->waiting.push_back(std::move(job));
  }
  const auto work = [state = shared_] {
    std::unique_lock lock{state->mutex};
    state->work(lock);
  };
  if (start_detached_thread(work, "in the background"))
    shared_->for_spare.notify_one(); // the job waits for the first free thread
}

} // namespace troupe::detail
