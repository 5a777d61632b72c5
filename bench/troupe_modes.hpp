/// The verbs with troupe: functions of the world and of a rank, and messages.
#pragma once

#include "verb_contestant.hpp"
#include <troupe/world.hpp>

#include <caf/fwd.hpp>

namespace bench {

/// Returns a maker for the modes of troupe:
/// - facade: a function of `world`; the client's thread waits;
/// - message: an actor in CAF's pool sends requests to the world's actor, and gets the answers as
///   messages;
/// - rank_local: functions of `world_rank`; a thread per rank waits.
/// The contestants share one set of buffers. `sys` must outlive them.
contestant_maker troupe_maker(caf::actor_system& sys, const troupe::world& world,
                              const footprint& memory);

} // namespace bench
