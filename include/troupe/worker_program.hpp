/// A program's own actors beside the ranks of a world, in the worker processes that have its
/// devices: they make rank-local calls there, without a way through the parent, which supervises.
#pragma once

#include <troupe/detail/type_ids.hpp>
#include <troupe/error.hpp>
#include <troupe/world_rank.hpp>

#include <caf/actor.hpp>
#include <caf/actor_system.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace troupe {

/// Where a program's actor is.
struct program_place {
  /// The worker's own; of its devices only that of the rank can be opened (`rank.where()`).
  caf::actor_system& system;
  /// The rank's calls. The other ranks' actors make theirs; that they go together is not checked
  /// before the stall limit. A message of the rank to itself is `errc::invalid_argument`. A call
  /// that is not done, whatever the reason (refused, cancelled, too late), but not one that is
  /// wrong by itself, ends the communicator: the others' calls would meet the rank's next one
  /// (errc::rank_not_issued). When a communicator ends, all calls that are not over have its error,
  /// and the world has another membership from the next one on. The ranks do not know how many
  /// calls of each other were done, so from then on a call has to name the membership that it means
  /// (`request_options`), as `rank.status()` says it: each rank's first calls that name one belong
  /// together. One that names another, or none, is `errc::membership_changed`.
  world_rank rank;
  /// As in `world_config::program`.
  std::vector<std::uint8_t> arguments;
  /// Sends bytes to the subscribers of the world's actor in the parent (`program_report`).
  /// @thread any
  /// @errors errc::invalid_argument: more than `most_program_bytes`; errc::unavailable: the parent
  ///         does not take them
  std::function<caf::error(std::vector<std::uint8_t>)> report;
};

/// Spawns the actor of one rank, and may take its time: it has a thread of its own. The actor gets
/// `program_message`s; it may block if it has one, too (`caf::detached`). It ends with the world
/// (an exit message), and with its process; in the process that has its device then, the program is
/// begun anew.
using program_factory = std::function<caf::actor(const program_place&)>;

/// Names a program of workers, before `worker_main`. Once per process, at start.
/// @errors errc::invalid_argument: the name is taken or empty, or there is no factory
caf::error register_program(std::string name, program_factory factory);

/// To a world's actor: for the program's actors, which get the same message. Those that have not
/// begun, for the first time or after a loss, get it when they have. Answered by an empty message
/// when it is on its way; what is on its way to a process that ends is lost with it.
/// @errors errc::invalid_argument: no such rank, or more than `most_program_bytes`;
///         errc::overloaded: `world_limits::waiting_limit` wait for that rank's already;
///         errc::unavailable: the world, the rank's device or its program has ended: the text names
///         the program and the reason; errc::not_supported: the world has no program
struct program_message {
  std::int32_t rank = -1; ///< -1: all that are in the world
  std::vector<std::uint8_t> bytes = {};
};

/// To subscribers of a world's actor: what a program's actor reports.
struct program_report {
  std::int32_t rank = -1;
  std::vector<std::uint8_t> bytes = {};
};

/// The same: a program's actor ended, or could not be begun. Its rank stays in the world.
struct program_ended {
  std::int32_t rank = -1;
  /// None: it was done. One of another library comes as `errc::internal`, with its text; CAF 0.17
  /// drops that of an exception, unless `spawn_program` (troupe/spawn_program.hpp) has spawned the
  /// actor.
  caf::error why = {};
};

template <class Inspector>
detail::inspect_result<Inspector> inspect(Inspector& f, program_message& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::program_message", field("rank", x.rank),
                        field("bytes", x.bytes));
}

template <class Inspector>
detail::inspect_result<Inspector> inspect(Inspector& f, program_report& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::program_report", field("rank", x.rank),
                        field("bytes", x.bytes));
}

template <class Inspector>
detail::inspect_result<Inspector> inspect(Inspector& f, program_ended& x) {
  using detail::field;
  return detail::fields(f, x, "troupe::program_ended", field("rank", x.rank), field("why", x.why));
}

} // namespace troupe
