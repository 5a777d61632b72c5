/// The operation that connects a communicator.
#pragma once

#include "operation/flight_ring.hpp"
#include "operation/operation.hpp"
#include <troupe/backend.hpp>
#include <troupe/error.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace troupe::detail {

class communicator;

/// Connects a communicator, in the order of all other work on its devices. The call blocks until
/// every rank is in it. Other collectives on the devices, above all a stalled one, can block it
/// there. So the lanes wait for each other, and for those collectives to be over, before they make
/// the call. From the operation's turn until then a lane issues nothing else.
///
/// There is no deadlock with the work of other communicators. All lanes have all operations in one
/// order. An operation that comes before this one is on all its lanes, or gets there first, and
/// waits for nothing that comes later. So it ends at some time, or its own limit ends it, which
/// needs no lane. An operation that comes later waits. If several operations connect on overlapping
/// lanes, the first in order finds its lanes free of the others.
class connect_operation final : public operation_of<nothing> {
public:
  /// The communicator ends if the lanes are not free within `patience`, or if a call does not
  /// return within `limit`.
  connect_operation(std::shared_ptr<communicator> target, connect_scope what,
                    std::chrono::nanoseconds patience, std::chrono::nanoseconds limit);
  bool bounded() const noexcept override { return false; }
  bool holds_lane() const noexcept override { return true; }
  caf::expected<issue_outcome> issue(part& p, lane& on) override;
  caf::expected<issue_outcome> proceed(part& p, lane& on) override;
  void on_lost_part(part& p, const caf::error& why) noexcept override;
  bool on_stall() noexcept override;
  const void* communicator_key() const noexcept override { return communicator_.get(); }

  world_tag world; ///< for the flight record

protected:
  void describe_to(flight_entry& x, const part& p) const noexcept override;
  void on_settled() noexcept override;

private:
  const std::shared_ptr<communicator> communicator_;
  const connect_scope what_;
  const std::chrono::nanoseconds limit_;
  std::vector<char> has_arrived_; // of each part; only its lane uses it
  std::atomic<std::size_t> arrived_{0};
  std::atomic<std::int64_t> held_since_{0};
  std::atomic<std::int64_t> entered_at_{0};
};

/// Gives each device of a communicator access to the memory of the others, when its turn comes on
/// the device's lane.
class access_operation final : public operation_of<nothing> {
public:
  explicit access_operation(std::shared_ptr<communicator> target);
  bool bounded() const noexcept override { return false; }
  caf::expected<issue_outcome> issue(part& p, lane& on) override;
  const void* communicator_key() const noexcept override { return communicator_.get(); }

private:
  const std::shared_ptr<communicator> communicator_;
};

} // namespace troupe::detail
