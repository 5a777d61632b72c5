#include "worker/parent/worker_mapping.hpp"

#include "foundation/fair_limit.hpp"
#include "worker/parent/worker_link.hpp"

#include <utility>

namespace troupe::detail {

bool worker_mapping::has_failed() const {
  const std::lock_guard lock{mutex_};
  return result_ && *result_;
}

bool worker_mapping::is_there() const {
  const std::lock_guard lock{mutex_};
  return result_ && !*result_;
}

void worker_mapping::end(caf::error result) {
  const bool is_there = !result;
  std::function<void(worker_link&)> then;
  {
    const std::lock_guard lock{mutex_};
    result_ = std::move(result);
    then = std::exchange(when_there_, nullptr);
    changed_.notify_all();
  }
  if (const auto worker = in(); worker && then && is_there)
    then(*worker);
}

caf::error worker_mapping::wait(worker_link& in) {
  const auto has_replied = [this] { return result_.has_value(); };
  const auto limit = in.request_limit();
  std::unique_lock lock{mutex_};
  if (limit.count() != 0 && !fair_limit{limit}.wait(changed_, lock, has_replied)) {
    lock.unlock();
    in.give_up_late("to map memory", limit); // ends the request
    lock.lock();
  }
  changed_.wait(lock, has_replied);
  return *result_;
}

void worker_mapping::when_there(std::function<void(worker_link&)> f) {
  {
    const std::lock_guard lock{mutex_};
    if (!result_) {
      when_there_ = std::move(f);
      return;
    }
    if (*result_)
      return;
  }
  if (const auto worker = in())
    f(*worker);
}

} // namespace troupe::detail
