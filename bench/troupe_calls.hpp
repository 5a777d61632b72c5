/// Requests of troupe for each verb: for the whole world, and for one rank.
#pragma once

#include "verbs.hpp"
#include <troupe/collective.hpp>
#include <troupe/world.hpp>
#include <troupe/world_rank.hpp>

#include <cstddef>
#include <functional>
#include <variant>
#include <vector>

namespace bench {

using buffers = std::vector<troupe::any_gpu_ref>;

/// The message to a world that runs a verb on all ranks.
using world_message =
    std::variant<troupe::all_reduce, troupe::reduce, troupe::broadcast, troupe::all_gather,
                 troupe::reduce_scatter, troupe::all_to_all, troupe::gather, troupe::scatter,
                 troupe::send_recv, troupe::group, troupe::barrier>;

/// Returns the message. `send`, `recv`: the buffers of all ranks; those that the verb does not use
/// are ignored.
world_message message_for(const verb& what, const buffers& send, const buffers& recv);

/// A call; each invocation is one operation.
using troupe_call = std::function<troupe::pending<troupe::collective_done>()>;

/// Returns the call of the world that does the same as the message.
troupe_call world_call(const troupe::world& world, const world_message& message,
                       const troupe::request_options& options);

/// Returns the call of one rank; none if the rank has no part in the verb.
troupe_call rank_call(const troupe::world_rank& rank, const verb& what,
                      const troupe::any_gpu_ref& send, const troupe::any_gpu_ref& recv,
                      const troupe::request_options& options);

} // namespace bench
