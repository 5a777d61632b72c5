/// Logs what keeps an actor system from ending.
#pragma once

#include "admission/deadline_watch.hpp"

#include <caf/fwd.hpp>

#include <chrono>
#include <memory>

namespace troupe::detail {

struct system_lease;

/// Returns whether a thread is in `~actor_system`, or in `await_all_actors_done`, and waits for
/// actors to end. Also false if that is unknown with the CAF version or the C library.
bool waits_for_actors(caf::actor_system& sys) noexcept;

/// Watches the actor system of a lease while the lease is held. Once the system has waited for its
/// actors for `patience`, logs the holders of the lease, and again after pauses that double.
void watch_shutdown(deadline_watch& deadlines, std::weak_ptr<system_lease> lease,
                    std::chrono::nanoseconds patience);

} // namespace troupe::detail
