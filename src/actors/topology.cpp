#include "actors/answer.hpp"
#include "actors/device_access.hpp"
#include "actors/supervised.hpp"
#include <troupe/topology.hpp>

#include <caf/all.hpp>

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

namespace troupe {

struct topology::owner {
  explicit owner(detail::topology_parts p) : parts(std::move(p)) {}
  ~owner() { caf::anon_send_exit(parts.actor, caf::exit_reason::user_shutdown); }
  owner(const owner&) = delete;
  owner& operator=(const owner&) = delete;

  const detail::topology_parts parts;
};

const std::shared_ptr<detail::topology_core>& detail::topology_access::core_of(const topology& x) {
  return x.owner_->parts.core;
}

namespace {

/// Returns an error that names what is missing for the graph to be settled.
caf::error overdue(const p2p_graph& graph) {
  std::string missing;
  for (auto& x : graph.devices)
    if (x.phase != device_phase::ready)
      missing += (missing.empty() ? "device " : ", ") + std::to_string(x.device);
  return make_error(errc::deadline_exceeded,
                    missing.empty() ? "the links were not measured before the deadline for opening"
                                    : "not ready before the deadline for opening: " + missing);
}

caf::error wait_until_settled(caf::actor_system& sys, const detail::topology_parts& parts) {
  caf::scoped_actor self{sys};
  detail::send(self, parts.actor, subscribe{});
  auto until = detail::from_now(parts.core->config().limits.open_deadline);
  p2p_graph now;
  while (!now.settled) {
    bool late = false;
    auto left = std::max(until - detail::clock::now(), detail::clock::duration{});
    // CAF cannot wait for as long as the clock can count.
    auto limit = std::min<detail::clock::duration>(left, std::chrono::hours{24});
    self->receive([&](p2p_graph& x) { now = std::move(x); },
                  caf::after(limit) >> [&] { late = detail::clock::now() >= until; });
    if (late)
      return overdue(now);
  }
  if (!now.devices.empty())
    return {};
  auto why = parts.core->lane_at(0).state().reason();
  return why ? why : make_error(errc::unavailable, "the devices ended");
}

} // namespace

caf::expected<topology> topology::open(caf::actor_system& sys, topology_config config) {
  if (auto refused = detail::check_may_block(); refused)
    return refused;
  auto parts = detail::make_topology(sys, std::move(config));
  if (!parts)
    return parts.error();
  topology result{std::make_shared<const owner>(std::move(*parts))};
  if (auto error = wait_until_settled(sys, result.owner_->parts); error)
    return error;
  return result;
}

caf::expected<topology> topology::open(const std::vector<device>& devices, topology_config config) {
  auto sys = detail::system_of(devices, config.devices, "a topology");
  if (!sys)
    return sys.error();
  return open(**sys, std::move(config));
}

p2p_graph topology::graph() const { return owner_->parts.core->graph(); }

const caf::actor& topology::actor() const noexcept { return owner_->parts.actor; }

pending<p2p_graph> topology::verify_links(const std::vector<std::int32_t>& devices,
                                          request_options options) const {
  return answer(owner_->parts.core->verify(devices, options));
}

pending<p2p_graph> topology::measure_links(const std::vector<std::int32_t>& devices,
                                           request_options options) const {
  return answer(owner_->parts.core->measure(devices, options));
}

pending<void> topology::copy(const any_gpu_ref& target, const any_gpu_ref& source,
                             request_options options) const {
  return answer(owner_->parts.core->copy(target, source, options));
}

pending<void> topology::copy(std::vector<copy_pair> copies, request_options options) const {
  return answer(owner_->parts.core->copy(copies, options));
}

pending<void> topology::replicate(const any_gpu_ref& source,
                                  const std::vector<any_gpu_ref>& targets,
                                  request_options options) const {
  return answer(owner_->parts.core->replicate(source, targets, options));
}

pending<void> topology::distribute(const any_gpu_ref& source,
                                   const std::vector<any_gpu_ref>& targets,
                                   request_options options) const {
  return answer(owner_->parts.core->distribute(source, targets, options));
}

topology_stats topology::stats() const { return owner_->parts.core->stats(); }

} // namespace troupe
