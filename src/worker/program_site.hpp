/// What a worker does with ranks that its own program drives.
#pragma once

#include "worker/protocol.hpp"
#include <troupe/backend.hpp>

#include <cstddef>
#include <span>

namespace troupe::detail {

/// @thread any
class program_site {
public:
  virtual ~program_site() = default;

  /// Has ready what takes time: this is a spare.
  /// @thread a job's
  virtual caf::error warm() = 0;
  /// `rank`, that the parent knows by `key`, is the program's from now on; `what` says of whom. It
  /// tells the worker when nothing of it is left.
  virtual caf::error take(communicator_key key, communicator_ranks rank,
                          std::span<const std::byte> what) = 0;
  /// The parent wants that rank to end; its end is told as above.
  virtual void give_back(communicator_key key) = 0;
  /// The parent has sent something. @thread one at a time, and with `take`
  virtual void received(std::span<const std::byte> what) = 0;
};

} // namespace troupe::detail
