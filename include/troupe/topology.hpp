/// A topology as a class.
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

/// Knows which devices reach which, over which links, and how fast, and enables access between
/// them. Copies refer to the same topology; destroying the last copy ends it. A moved-from object
/// must not be used. The actor system must outlive the object.
/// @thread any, several at once; a copy must not be assigned to while another thread uses that copy
class topology {
public:
  /// Spawns a topology and blocks until its graph is settled.
  /// @errors those of `spawn_p2p_topology`; errc::deadline_exceeded: it is not settled after
  ///         `topology_limits::open_deadline`; errc::unavailable, or the error of a device: no
  ///         device is alive; errc::would_block in an actor of CAF's pool: spawn the actor there
  static caf::expected<topology> open(caf::actor_system& sys, topology_config config = {});
  /// The same over devices that the application has opened; ignores `config.devices`.
  static caf::expected<topology> open(const std::vector<device>& devices,
                                      topology_config config = {});

  /// Returns the present graph; does not block.
  p2p_graph graph() const;

  /// Returns the topology's actor, for messages.
  const caf::actor& actor() const noexcept;

  /// Same as the message `verify_links`.
  pending<p2p_graph> verify_links(const std::vector<std::int32_t>& devices = {},
                                  request_options options = {}) const;
  /// Same as the message `measure_links`.
  pending<p2p_graph> measure_links(const std::vector<std::int32_t>& devices = {},
                                   request_options options = {}) const;

  /// Copies between any two buffers on devices of the topology. Admitted on the caller's thread.
  /// @errors those of the message `copy_batch`
  pending<void> copy(const any_gpu_ref& target, const any_gpu_ref& source,
                     request_options options = {}) const;
  /// Same as the message `copy_batch`.
  pending<void> copy(std::vector<copy_pair> copies, request_options options = {}) const;
  /// Same as the message `replicate`.
  pending<void> replicate(const any_gpu_ref& source, const std::vector<any_gpu_ref>& targets,
                          request_options options = {}) const;
  /// Same as the message `distribute`.
  pending<void> distribute(const any_gpu_ref& source, const std::vector<any_gpu_ref>& targets,
                           request_options options = {}) const;

  /// Returns the present statistics; does not block.
  topology_stats stats() const;

private:
  friend struct detail::topology_access;
  struct owner;
  explicit topology(std::shared_ptr<const owner> x) : owner_(std::move(x)) {}

  std::shared_ptr<const owner> owner_;
};

} // namespace troupe
