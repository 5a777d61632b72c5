#include "watchdog.hpp"

#include <cstdio>
#include <cstdlib>
#include <utility>

namespace bench {

watchdog::watchdog(std::chrono::seconds limit)
    : limit_(limit), end_(clock::now() + limit), thread_([this] { watch(); }) {}

watchdog::~watchdog() {
  {
    const std::lock_guard lock{mutex_};
    over_ = true;
  }
  condition_.notify_one();
  thread_.join();
}

void watchdog::enter(std::string step) {
  const std::lock_guard lock{mutex_};
  step_ = std::move(step);
  since_ = clock::now();
}

void watchdog::watch() {
  std::unique_lock lock{mutex_};
  if (condition_.wait_until(lock, end_, [this] { return over_; }))
    return;
  const std::chrono::duration<double> time = clock::now() - since_;
  std::fflush(stdout);
  std::fprintf(stderr, "bench: the time limit of %lld s is over; for %.1f s it has been at: %s\n",
               static_cast<long long>(limit_.count()), time.count(), step_.c_str());
  std::_Exit(3);
}

} // namespace bench
