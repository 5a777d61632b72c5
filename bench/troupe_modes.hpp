/// The all-reduce with troupe: functions of the world and of a rank, and messages.
#pragma once

#include "summing.hpp"
#include <troupe/world.hpp>

#include <caf/fwd.hpp>

#include <cstddef>
#include <memory>

namespace bench {

struct troupe_contestants {
  /// `world::all_reduce`; the client's thread waits.
  std::unique_ptr<contestant> facade;
  /// The message `all_reduce` from an actor in CAF's pool, which gets the answers as messages.
  std::unique_ptr<contestant> message;
  /// `world_rank::all_reduce`; a thread per rank waits.
  std::unique_ptr<contestant> rank_local;
};

/// Makes the contestants, which share one set of buffers of `bytes`. `sys` must outlive them.
troupe_contestants make_troupe(caf::actor_system& sys, const troupe::world& world,
                               std::size_t bytes);

} // namespace bench
