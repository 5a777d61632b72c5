#include "worker/parent/open_count.hpp"

#include <utility>

namespace troupe::detail {

void open_count::begin() noexcept {
  const std::lock_guard lock{mutex_};
  ++open_;
}

void open_count::end() noexcept {
  std::vector<std::function<void()>> then;
  {
    const std::lock_guard lock{mutex_};
    if (--open_ != 0)
      return;
    none_.notify_all();
    then.swap(then_);
  }
  for (auto& f : then)
    f();
}

bool open_count::is_none() const noexcept {
  const std::lock_guard lock{mutex_};
  return open_ == 0;
}

void open_count::when_none(std::function<void()> f) {
  {
    const std::lock_guard lock{mutex_};
    if (open_ != 0) {
      then_.push_back(std::move(f));
      return;
    }
  }
  f();
}

bool open_count::wait_for_none(std::chrono::nanoseconds limit) noexcept {
  std::unique_lock lock{mutex_};
  return none_.wait_for(lock, limit, [this] { return open_ == 0; });
}

} // namespace troupe::detail
