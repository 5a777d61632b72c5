/// A worker of CAF's pool that spins for answers to actors.
#pragma once

#include <troupe/detail/caf_compat.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>

namespace troupe::detail {

/// To wake a parked worker costs tens of microseconds, more than a small collective takes. So after
/// an actor of the pool has made a request, one worker waits awake for a short time, and runs the
/// actor itself when its answer comes. As clients that wait on a `pending`, it does so only where
/// there are cores enough (`lane_options::client_spin`).
class answer_spinner final : public pool_job, public job_sink {
public:
  explicit answer_spinner(caf::actor_system& sys) : job_sink(sys), system_(sys) {}

  /// Sees to it that a worker waits. @thread a worker of the pool
  void wake();

  caf::resumable::resume_result run(pool_context* on, std::size_t throughput) override;

protected:
  /// @thread any
  void take(caf::resumable* job) override;

private:
  /// How long it waits for the next answer, as lanes for the next request, and in all before other
  /// jobs of the pool have their turn.
  static constexpr std::chrono::microseconds patience{200};
  static constexpr std::chrono::milliseconds turn{2};

  caf::resumable* next_job(std::chrono::steady_clock::time_point until) noexcept;

  caf::actor_system& system_;
  std::atomic<bool> active_{false};
  /// Itself while it waits; then what it is to run; null while it does something else.
  std::atomic<caf::resumable*> slot_{nullptr};
};

} // namespace troupe::detail
