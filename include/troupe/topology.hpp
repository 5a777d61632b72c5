/// A topology as functions.
#pragma once

#include <troupe/device.hpp>
#include <troupe/p2p_topology.hpp>
#include <troupe/pending.hpp>

#include <caf/actor.hpp>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace troupe {

namespace detail {
struct topology_access;
} // namespace detail

/// Which devices reach which, over what, and how fast; sees to it that they may. Copies are the
/// same topology; the last of them ends it. One that was moved from must not be used. Its actor
/// system must outlive it.
/// @thread any, several at once; a copy is not assigned to while another thread uses that copy
class topology {
public:
  /// Blocks until the graph is settled.
  /// @errors as `spawn_p2p_topology`; errc::deadline_exceeded: it is not, after
  ///         `topology_limits::open_deadline`; errc::unavailable, and what a device says: none of
  ///         them lives; errc::would_block in an actor of CAF's pool: spawn the actor there
  static caf::expected<topology> open(caf::actor_system& sys, topology_config config = {});
  /// Over devices that the application has.
  static caf::expected<topology> open(const std::vector<device>& devices,
                                      topology_config config = {});

  /// At this moment; does not block.
  p2p_graph graph() const;

  /// The topology's actor, for messages.
  const caf::actor& actor() const noexcept;

  /// As the message `verify_links`.
  pending<p2p_graph> verify_links(const std::vector<std::int32_t>& devices = {},
                                  request_options options = {}) const;
  /// As the message `measure_links`.
  pending<p2p_graph> measure_links(const std::vector<std::int32_t>& devices = {},
                                   request_options options = {}) const;

  /// Between any two buffers on devices of the topology; errors as those of the message
  /// `copy_batch`. Admitted on the caller's thread.
  pending<void> copy(const any_gpu_ref& target, const any_gpu_ref& source,
                     request_options options = {}) const;
  /// As the message `copy_batch`.
  pending<void> copy(std::vector<copy_pair> copies, request_options options = {}) const;
  /// As the message `replicate`.
  pending<void> replicate(const any_gpu_ref& source, const std::vector<any_gpu_ref>& targets,
                          request_options options = {}) const;
  /// As the message `distribute`.
  pending<void> distribute(const any_gpu_ref& source, const std::vector<any_gpu_ref>& targets,
                           request_options options = {}) const;

  /// At this moment; does not block.
  topology_stats stats() const;

private:
  friend struct detail::topology_access;
  struct owner;
  explicit topology(std::shared_ptr<const owner> x) : owner_(std::move(x)) {}

  std::shared_ptr<const owner> owner_;
};

} // namespace troupe
