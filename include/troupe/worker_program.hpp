/// A program's own actors beside the ranks of a world, in the worker processes that have its
/// devices. They make rank-local calls there directly; the parent only supervises.
#pragma once

#include <troupe/detail/type_ids.hpp>
#include <troupe/dtype.hpp>
#include <troupe/error.hpp>
#include <troupe/gpu_ref.hpp>
#include <troupe/world_rank.hpp>

#include <caf/actor.hpp>
#include <caf/actor_system.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace troupe {

/// The longest name of a buffer, and the number of names of one rank (`program_place::keep`).
inline constexpr std::size_t most_kept_name_bytes = 256;
inline constexpr std::size_t most_kept_names = 1024;

/// A buffer of a rank that outlives its process (`program_place::keep`).
template <element T> struct kept_buffer {
  gpu_ref<T> ref;
  bool found = false; ///< an earlier call for the rank has made it
};
/// The same, with the type known at run time.
struct any_kept_buffer {
  any_gpu_ref ref;
  bool found = false;
};

/// The environment of a program's actor.
struct program_place {
  /// The worker's own system. Of its devices, only that of the rank can be opened (`rank.where()`).
  caf::actor_system& system;
  /// The rank's calls. The other ranks' actors make theirs. Calls that do not match end the
  /// communicator (errc::collective_mismatch) if they go direct and both ranks exchange data in
  /// them; otherwise the stall limit does. A message of the rank to itself is
  /// `errc::invalid_argument`. If a call is not done, for whatever reason (refused, cancelled, too
  /// late), the communicator ends: the other ranks' calls would match the rank's next one
  /// (errc::rank_not_issued). A call that is invalid by itself does not end it.
  ///
  /// When a communicator ends, all calls that are not over get its error, and the world has another
  /// membership from the next communicator on. The ranks do not know how many calls of each other
  /// were done. So from then on a call has to name the membership that it requires
  /// (`request_options`), as `rank.status()` reports it: each rank's first calls that name one
  /// match each other. A call that names another one, or none, is `errc::membership_changed`.
  world_rank rank;
  /// As in `world_config::program`.
  std::vector<std::uint8_t> arguments;
  /// Sends bytes to the subscribers of the world's actor in the parent (`program_report`).
  /// @thread any
  /// @errors errc::invalid_argument: more than `most_program_bytes`; errc::unavailable: the parent
  ///         does not take them
  std::function<caf::error(std::vector<std::uint8_t>)> report;
  /// As `keep`, with the type known at run time.
  std::function<caf::expected<any_kept_buffer>(const std::string&, dtype, std::size_t count)>
      keep_any = {};

  /// Returns the rank's buffer of that name, which the parent owns until the world ends. The first
  /// call allocates it. Later calls find it, in this process and in the next ones of the device: so
  /// a program goes on after a loss where it was. A buffer that the lost process was writing, or
  /// that had indeterminate or skipped ranges then, is indeterminate as a whole until it is
  /// overwritten. The content of any other one is what the process left. New memory is
  /// indeterminate until it is written.
  ///
  /// `found` is false if the memory is new: at the first call, and if the device's memory was not
  /// kept. Blocks, after a loss until the work of the lost process is over. While a process has
  /// named buffers, its device can neither be handed over nor reset (errc::buffer_acquired).
  /// @thread any that may block, such as the factory's, or an actor's own
  /// @errors errc::shape_mismatch: the buffer has another type or count; errc::out_of_memory;
  ///         errc::invalid_argument: the name is empty or longer than `most_kept_name_bytes`, or
  ///         `count` is 0; errc::overloaded: the rank has `most_kept_names` names;
  ///         errc::unavailable: the world or the parent has ended; errc::would_block
  template <element T>
  caf::expected<kept_buffer<T>> keep(const std::string& name, std::size_t count) const {
    auto got = keep_any(name, dtype_v<T>, count);
    if (!got)
      return got.error();
    auto ref = gpu_ref<T>::from(std::move(got->ref));
    if (!ref)
      return ref.error();
    return kept_buffer<T>{std::move(*ref), got->found};
  }
};

/// A function that spawns the actor of one rank. It runs on a thread of its own, so it may take
/// long. The actor gets the `program_message`s. An actor with a thread of its own (`caf::detached`)
/// may block. It ends with the world (by an exit message), or with its process; then the program
/// starts again in the next process of the device.
using program_factory = std::function<caf::actor(const program_place&)>;

/// Registers a program of workers by name, before `worker_main`. Once per process, at start.
/// @errors errc::invalid_argument: the name is taken or empty, or the factory is empty
caf::error register_program(std::string name, program_factory factory);

/// Sent to a world's actor, for the program's actors, which get the same message. Actors that have
/// not started, for the first time or after a loss, get it when they have. Reply: an empty message,
/// when it is on its way. A message on its way to a process that ends is lost.
/// @errors errc::invalid_argument: no such rank, or more than `most_program_bytes`;
///         errc::overloaded: `world_limits::waiting_limit` messages already wait for that rank;
///         errc::unavailable: the world, the rank's device or its program has ended, with the
///         program and the reason in the text; errc::not_supported: the world has no program
struct program_message {
  std::int32_t rank = -1; ///< -1: all present ranks
  std::vector<std::uint8_t> bytes = {};
};

/// Sent to subscribers of a world's actor: a report of a program's actor. Reports and ends that
/// come before the first subscriber are kept for it: the newest ones, up to 1 MiB.
struct program_report {
  std::int32_t rank = -1;
  std::vector<std::uint8_t> bytes = {};
};

/// Sent likewise: a program's actor ended or could not be started. Its rank stays in the world.
struct program_ended {
  std::int32_t rank = -1;
  /// None: it finished. An error of another library becomes `errc::internal`, with its text. CAF
  /// 0.17 drops the text of an exception, unless `spawn_program` (troupe/spawn_program.hpp) has
  /// spawned the actor.
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
