/// Says what keeps an actor system from its end.
#pragma once

#include "core/timekeeper.hpp"

#include <caf/fwd.hpp>

#include <chrono>
#include <memory>

namespace troupe::detail {

struct system_lease;

/// Is a thread in `~actor_system`, or in `await_all_actors_done`, and waits for actors to end?
/// False, too, with a CAF or a C library of which that cannot be found out.
bool waits_for_actors(caf::actor_system& sys) noexcept;

/// Watches the actor system of a lease as long as the lease is held: once the system has waited for
/// its actors for `patience`, logs what holds the lease, and again after pauses that double.
void watch_shutdown(timekeeper& keeper, std::weak_ptr<system_lease> lease,
                    std::chrono::nanoseconds patience);

} // namespace troupe::detail
