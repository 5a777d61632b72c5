/// The outcome of an operation's calls on its communicator, and the errors that end it.
#pragma once

#include "operation/operation.hpp"
#include <troupe/error.hpp>

#include <cstdint>

namespace troupe::detail {

class communicator;

/// Handles `error`, the result of a call on a communicator for part `p` of `op`. A communicator
/// error ends the communicator. errc::out_of_memory ends it too: the rank may have stopped in the
/// middle of the work that needed the memory.
caf::error after_call(const operation& op, const part& p, communicator& on, caf::error error);

/// Returns the outcome of part `p` of `op`, whose call on a communicator gave `error`.
caf::expected<issue_outcome> issued(operation& op, const part& p, communicator& on,
                                    caf::error error);

/// Returns why the communicator ends because part `p` was not issued: for the reason `why`, or, if
/// there is none, because the operation failed before.
caf::error loss_error(const operation& op, const part& p, std::uint64_t epoch, caf::error why);

/// Returns why a communicator ends because `op` stalled.
caf::error stall_error(const operation& op, std::uint64_t epoch);

} // namespace troupe::detail
