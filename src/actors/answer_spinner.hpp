/// A worker of CAF's pool that spins for answers to actors.
#pragma once

#include <troupe/detail/caf_compat.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>

namespace troupe::detail {

/// Waking a parked worker costs tens of microseconds, more than a small collective takes. So after
/// an actor of the pool has made a request, one worker waits awake for a short time. It runs the
/// actor itself when its answer comes. Like clients that wait on a `pending`, it does so only if
/// there are enough cores (`lane_options::client_spin`).
class answer_spinner final : public pool_job, public job_sink {
public:
  explicit answer_spinner(caf::actor_system& sys) : job_sink(sys), system_(sys) {}

  /// Makes sure that a worker waits. @thread a worker of the pool
  void wake();

  caf::resumable::resume_result run(pool_context* on, std::size_t throughput) override;

protected:
  /// @thread any
  void take(caf::resumable* job) override;

private:
  /// The longest wait for the next answer, like that of lanes for the next request; and the total
  /// time before other jobs of the pool have their turn.
  static constexpr std::chrono::microseconds patience{200};
  static constexpr std::chrono::milliseconds turn{2};

  caf::resumable* next_job(std::chrono::steady_clock::time_point until) noexcept;

  caf::actor_system& system_;
  std::atomic<bool> active_{false};
  /// This object while it waits; then the job to run; null while it does other work.
  std::atomic<caf::resumable*> slot_{nullptr};
};

} // namespace troupe::detail
