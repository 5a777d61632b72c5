/// Continuations and tasks that run in an actor.
#pragma once

#include <troupe/pending.hpp>

#include <caf/actor.hpp>

#include <functional>
#include <memory>
#include <utility>

namespace troupe {

/// A message within one process: what the executor of an actor has for it. See `runs_tasks`.
class actor_task {
public:
  actor_task() = default;
  explicit actor_task(std::function<void()> f)
      : f_(std::make_shared<std::function<void()>>(std::move(f))) {}

  void run() const {
    if (f_)
      (*f_)();
  }

private:
  std::shared_ptr<std::function<void()>> f_;
};

/// Returns an executor that runs tasks in an actor, one at a time, between its messages. Keeps the
/// actor alive. If the actor is ended nevertheless, what comes later is dropped: a task
/// (troupe/task.hpp) that runs there ends (errc::cancelled) when what it awaits is over, and its
/// objects are destroyed on the callback thread. The actor's behavior has to include
/// `runs_tasks()`:
///
///     caf::behavior make_behavior() override {
///       troupe::start(work(), troupe::executor_of(this));
///       return {troupe::runs_tasks()};
///     }
std::shared_ptr<executor> executor_of(caf::actor target);

/// Returns the handler of an actor's behavior that runs its tasks.
inline auto runs_tasks() {
  return [](const actor_task& x) { x.run(); };
}

} // namespace troupe
