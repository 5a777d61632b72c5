/// Interface to the part of a worker that drives ranks for its program.
#pragma once

#include "worker/protocol/protocol.hpp"
#include <troupe/backend.hpp>

#include <cstddef>
#include <span>

namespace troupe::detail {

/// @thread any
class program_site {
public:
  virtual ~program_site() = default;

  /// Prepares slow resources in advance, for a spare.
  /// @thread the one that drives the device
  virtual caf::error warm() = 0;
  /// Takes over `rank`, which the parent knows by `key`; `what` describes it. Tells the worker when
  /// nothing of the rank is left.
  virtual caf::error take(communicator_key key, communicator_ranks rank,
                          std::span<const std::byte> what) = 0;
  /// Ends that rank for the parent. Returns when no operation on it can succeed any more.
  virtual void close(communicator_key key) = 0;
  /// Allows to abort or destroy that rank: all ranks of its communicator are closed.
  virtual void allow_end(communicator_key key) = 0;
  /// Receives a message of the parent. @thread one call at a time, `take` included
  virtual void received(std::span<const std::byte> what) = 0;
};

} // namespace troupe::detail
