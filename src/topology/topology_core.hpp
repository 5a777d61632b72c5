/// The data side of a topology: what is known about the links between its devices. The
/// `p2p_topology` actor decides when to act, and this class acts.
#pragma once

#include "device/device_core.hpp"
#include "runtime/runtime.hpp"
#include "topology/device_copies.hpp"
#include <troupe/collective.hpp>
#include <troupe/p2p_graph.hpp>
#include <troupe/p2p_topology.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace troupe::detail {

class topology_core : public std::enable_shared_from_this<topology_core> {
public:
  topology_core(std::shared_ptr<runtime> runtime, topology_config config,
                std::vector<std::shared_ptr<lane>> lanes);

  const std::shared_ptr<runtime>& owner() const noexcept { return runtime_; }
  const topology_config& config() const noexcept { return config_; }
  std::size_t size() const noexcept { return nodes_.size(); }
  device_core device_at(std::size_t place) const;
  lane& lane_at(std::size_t place) const noexcept { return *nodes_[place].on; }

  p2p_graph graph() const;

  // -- for the actor

  /// Sets `on_change`, called on any thread when the graph has changed. Before all that follows.
  void set_on_change(std::function<void()> on_change) { on_change_ = std::move(on_change); }
  /// Queries in the background what the links are.
  void find_links();
  /// Enables access over the links of a device that is ready, where possible, on its lane.
  void connect(std::size_t place);
  /// Notes that a device has changed its phase.
  void note_change();
  /// Checks in the background the links that wait for a check (`topology_config::verify`), if any.
  /// Links that come meanwhile are for the next call, after the change that this one ends with.
  void check_new_links();
  /// Refuses new requests and answers running ones with `why`.
  void close(const caf::error& why);

  // -- for requests

  using answer = std::shared_ptr<operation_of<p2p_graph>>;

  answer verify(const std::vector<std::int32_t>& devices, const request_options& options);
  answer measure(const std::vector<std::int32_t>& devices, const request_options& options);

  using copies_answer = std::shared_ptr<operation_of<nothing>>;

  copies_answer copy(const any_gpu_ref& target, const any_gpu_ref& source,
                     const request_options& options);
  copies_answer copy(const std::vector<copy_pair>& copies, const request_options& options);
  copies_answer replicate(const any_gpu_ref& source, const std::vector<any_gpu_ref>& targets,
                          const request_options& options);
  copies_answer distribute(const any_gpu_ref& source, const std::vector<any_gpu_ref>& targets,
                           const request_options& options);
  topology_stats stats() const noexcept;

  // -- for copies; without a lock, unless something fails

  /// Returns the route between memory of these generations.
  copy_route route_of(const link_ends& x, const link_generations& in) const noexcept;
  /// Returns the route between these buffers; pending within one device.
  copy_route route_of(const link_ends& ends, const any_gpu_ref& target,
                      const any_gpu_ref& source) const noexcept;
  /// Returns the link that copies from `x.from` to `x.to` use if nothing is wrong with it: of the
  /// source's device, or of the target's if devices only read from each other.
  link_ends first_choice(const link_ends& x) const noexcept;
  /// Returns why requests are refused; none: they are not.
  caf::error why_closed() const;
  /// Returns why a link cannot be used as before.
  caf::error why_not(const link_ends& x) const;
  /// Takes out a link over which a copy failed.
  void fail_link(const link_ends& x, const caf::error& why) noexcept;
  /// Counts copies that are done. No route: within a device.
  void count(std::optional<copy_route> route, std::size_t copies, std::size_t bytes) noexcept;

  // -- for tests of links

  /// As `connect`, for a caller that waits for it.
  std::shared_ptr<connect_peers_operation> start_connect(std::size_t place,
                                                         clock::time_point deadline);
  /// Returns why a link is not ready. None: both devices have connected in this generation.
  caf::error why_not_ready(const link_ends& x) const;
  struct link_life {
    std::uint64_t from = 0; ///< incarnations of its devices
    std::uint64_t to = 0;
    std::uint64_t failures = 0; ///< how often it was taken out so far
    friend bool operator==(const link_life&, const link_life&) = default;
  };
  /// Returns the present one, if access was enabled in both devices.
  std::optional<link_life> connected_in(const link_ends& x) const;
  bool is_possible(const link_ends& x) const;
  bool is_enabled(const link_ends& x) const;
  bool waits_for_check(const link_ends& x) const;
  /// Notes that a check that began in this life found the link right, unless it failed meanwhile.
  void mark_right(const link_ends& x, const link_life& in);
  /// Stops the use of a link because of `why`.
  void take_out(const link_ends& x, link_check found, const caf::error& why);
  struct figures {
    double bandwidth = 0;
    double bandwidth_both = 0;
    double latency_us = 0;
  };
  void set_figures(const link_ends& x, const figures& measured);

private:
  struct node {
    std::shared_ptr<lane> on;
    peer_findings findings; // peers by place; of the generation that was connected last
  };
  struct edge {
    peer_link link;
    link_check checked = link_check::unchecked;
    link_life right_in; ///< the last life in which it was found right
    caf::error out;     // why it was taken out
    std::uint64_t failures = 0;
    figures measured;
  };

  /// Counts of copies that are done.
  struct alignas(64) tally {
    std::atomic<std::uint64_t> copies{0};
    std::atomic<std::uint64_t> bytes{0};
  };

  std::optional<std::size_t> index_of(const any_gpu_ref& x) const noexcept;
  caf::error check_copy(const char* verb, const any_gpu_ref& target,
                        const any_gpu_ref& source) const;
  caf::error check_copies(const char* verb, std::span<const copy_pair> copies) const;
  template <class Make> copies_answer start(const request_options& options, Make make);
  copies_answer operation_of_copy(const copy_pair& x);
  copies_answer copy_nothing(const char* verb, const request_options& options);
  copies_answer start_copies(const char* verb, std::span<const copy_pair> copies,
                             const request_options& options);
  std::vector<device_copies_operation::peer_batch>
  batches_of(std::span<const copy_pair> copies) const;

  // Called under mutex_. They do not take the admission lock, which is always locked before mutex_.
  edge& edge_at(const link_ends& x) { return edges_[x.from * size() + x.to]; }
  const edge& edge_at(const link_ends& x) const { return edges_[x.from * size() + x.to]; }
  bool has_ended(std::size_t place) const;
  bool is_connected(std::size_t place) const;
  peer_access access_of(const link_ends& x, caf::error& reason) const;
  bool waits_for_check_locked(const link_ends& x) const;
  link_generations generations_of(const link_ends& x) const;
  link_life life_of(const link_ends& x) const;
  caf::error failure_to_connect(const link_ends& x) const;
  p2p_link link_at(const link_ends& x) const;
  void find_islands(p2p_graph& graph) const;
  void note_routes() noexcept;

  void on_connected(std::size_t place, const peer_findings& found);
  void links_found(const std::vector<std::pair<link_ends, peer_link>>& all);
  std::vector<link_ends> links_between(const std::vector<std::size_t>& places) const;
  caf::expected<std::vector<std::size_t>>
  indices_of(const char* verb, const std::vector<std::int32_t>& devices) const;
  answer new_request(const char* verb, const request_options& options);
  using test = caf::error (*)(topology_core&, const answer&, const std::vector<link_ends>&);
  answer start(const char* verb, test what, const std::vector<std::int32_t>& devices,
               const request_options& options);
  void run(test what, const answer& request, std::vector<link_ends> links,
           std::function<void()> then);
  caf::error end_cause() const;
  void changed();

  const std::shared_ptr<runtime> runtime_;
  const topology_config config_;
  std::function<void()> on_change_;
  mutable std::mutex mutex_;
  std::vector<node> nodes_;
  std::vector<edge> edges_;
  bool links_known_ = false;
  bool checking_ = false;
  std::uint64_t version_ = 1;
  caf::error closed_; // why; none: it is open
  std::atomic<bool> is_closed_{false};
  std::vector<std::atomic<std::uint64_t>> routes_; // of each edge, with its generations
  std::map<int, std::size_t> indices_;             // by ordinal
  tally local_;
  tally direct_;
  tally staged_;
  std::atomic<std::uint64_t> links_failed_{0};
  std::vector<std::weak_ptr<operation_of<p2p_graph>>> requests_;
  std::mutex one_test_; // one at a time; only test threads wait for it
};

} // namespace troupe::detail
