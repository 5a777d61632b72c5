#include "worker/parent/open_count.hpp"

namespace troupe::detail {

void open_count::begin() noexcept {
  const std::lock_guard lock{mutex_};
  ++open_;
}

void open_count::end() noexcept {
  const std::lock_guard lock{mutex_};
  if (--open_ == 0)
    none_.notify_all();
}

bool open_count::wait_for_none(std::chrono::nanoseconds limit) noexcept {
  std::unique_lock lock{mutex_};
  return none_.wait_for(lock, limit, [this] { return open_ == 0; });
}

} // namespace troupe::detail
