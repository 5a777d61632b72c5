/// The all-reduce through troupe: as functions, of the world and of each rank, and in messages.
#pragma once

#include "summing.hpp"
#include <troupe/world.hpp>

#include <caf/fwd.hpp>

#include <cstddef>
#include <memory>

namespace bench {

struct troupe_contestants {
  /// `world::all_reduce`, awaited on the client's thread.
  std::unique_ptr<contestant> facade;
  /// The message `all_reduce`, from an actor in CAF's pool, which gets the answers as messages.
  std::unique_ptr<contestant> message;
  /// `world_rank::all_reduce`, awaited by a thread per rank.
  std::unique_ptr<contestant> rank_local;
  /// As `facade`, with symmetric memory; null with one device.
  std::unique_ptr<contestant> symmetric;
};

/// The others use one set of buffers of `bytes`, the last one its own, of `symmetric_bytes`. `sys`
/// outlives them.
troupe_contestants make_troupe(caf::actor_system& sys, const troupe::world& world,
                               std::size_t bytes, std::size_t symmetric_bytes);

} // namespace bench
