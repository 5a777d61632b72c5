/// Threads for work that blocks for a long time.
#pragma once

#include "foundation/fair_limit.hpp"

#include <functional>
#include <memory>

namespace troupe::detail {

/// Runs each job on a thread of its own: such jobs are rare, and a stuck one must not hold up
/// another. One thread is started in advance, for jobs that get no other thread: without it they
/// could wait for ever.
class background {
public:
  /// @throws std::system_error: the system gives no thread
  background();

  void run(std::function<void()> job);
  /// Waits until no job runs. Returns false if the limit came first.
  bool wait_idle(fair_limit& limit) noexcept;

private:
  struct shared;
  std::shared_ptr<shared> shared_;
};

} // namespace troupe::detail
