#include "actors/answer_spinner.hpp"

#include "foundation/spin.hpp"

#include <caf/all.hpp>

#include <algorithm>

namespace troupe::detail {

void answer_spinner::wake() {
  if (client_spin().count() != 0 && !active_.exchange(true))
    run_in_pool(system_, this);
}

void answer_spinner::take(caf::resumable* job) {
  caf::resumable* waiting = this;
  if (!slot_.compare_exchange_strong(waiting, job, std::memory_order_acq_rel))
    run_in_pool(system_, job);
}

/// Returns null if no job came.
caf::resumable* answer_spinner::next_job(clock::time_point until) noexcept {
  caf::resumable* waiting = this;
  slot_.store(waiting, std::memory_order_release);
  auto came = [&] { return slot_.load(std::memory_order_acquire) != waiting; };
  if (!spin_until(came, until - clock::now()) &&
      slot_.compare_exchange_strong(waiting, nullptr, std::memory_order_acq_rel))
    return nullptr;
  return slot_.exchange(nullptr, std::memory_order_acquire);
}

caf::resumable::resume_result answer_spinner::run(pool_context* on, std::size_t throughput) {
  const auto end = clock::now() + turn;
  for (auto now = clock::now(); now < end; now = clock::now()) {
    auto* job = next_job(std::min(end, now + patience));
    if (job == nullptr) {
      active_.store(false);
      return resumable::done;
    }
    run_job(job, on, throughput);
  }
  return resumable::resume_later;
}

} // namespace troupe::detail
