#include "topology/topology_core.hpp"

#include "foundation/error_text.hpp"
#include "foundation/log.hpp"
#include "runtime/retried_request.hpp"
#include "topology/link_tests.hpp"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

namespace troupe::detail {

namespace {

std::string name_of(const device_state& from, const device_state& to) {
  return "the link from device " + std::to_string(from.ordinal()) + " to device " +
         std::to_string(to.ordinal());
}

} // namespace

topology_core::topology_core(std::shared_ptr<runtime> runtime, topology_config config,
                             std::vector<std::shared_ptr<lane>> lanes)
    : runtime_(std::move(runtime)), config_(std::move(config)), edges_(lanes.size() * lanes.size()),
      routes_(edges_.size()) {
  for (auto& x : lanes) {
    indices_[x->state().ordinal()] = nodes_.size();
    nodes_.push_back({std::move(x), {}});
  }
}

device_core topology_core::device_at(std::size_t place) const {
  return {runtime_, nodes_[place].on, config_.limits.deadline};
}

// -- what is known

bool topology_core::has_ended(std::size_t place) const {
  auto phase = nodes_[place].on->state().phase();
  return phase == device_phase::failed || phase == device_phase::shut_down;
}

bool topology_core::is_connected(std::size_t place) const {
  auto& x = nodes_[place];
  auto live = x.on->state().live_incarnation();
  return live != 0 && x.findings.incarnation == live;
}

/// Returns the generations that were connected last. The devices' own ones may have changed since.
link_generations topology_core::generations_of(const link_ends& x) const {
  return {nodes_[x.from].findings.generation, nodes_[x.to].findings.generation};
}

/// Returns the life of a link since its devices were connected last.
topology_core::link_life topology_core::life_of(const link_ends& x) const {
  return {nodes_[x.from].findings.incarnation, nodes_[x.to].findings.incarnation,
          edge_at(x).failures};
}

caf::error topology_core::failure_to_connect(const link_ends& x) const {
  if (auto& why = nodes_[x.from].findings.peers[x.to].enabled)
    return why;
  return nodes_[x.to].findings.peers[x.from].admitted;
}

peer_access topology_core::access_of(const link_ends& x, caf::error& reason) const {
  if (reason = edge_at(x).out; reason)
    return peer_access::failed;
  auto& from = nodes_[x.from].findings;
  if (from.generation == 0)
    return peer_access::pending;
  if (!from.peers[x.to].can_access && !from.peers[x.to].enabled)
    return peer_access::none;
  if (!is_connected(x.from) || !is_connected(x.to))
    return peer_access::pending;
  if (reason = failure_to_connect(x); reason)
    return peer_access::failed;
  if (config_.verify && edge_at(x).right_in != life_of(x))
    return peer_access::pending;
  return peer_access::enabled;
}

bool topology_core::waits_for_check_locked(const link_ends& x) const {
  caf::error reason;
  return config_.verify && is_connected(x.from) && is_connected(x.to) && !has_ended(x.from) &&
         !has_ended(x.to) && access_of(x, reason) == peer_access::pending;
}

bool topology_core::waits_for_check(const link_ends& x) const {
  std::lock_guard lock{mutex_};
  return waits_for_check_locked(x);
}

bool topology_core::is_possible(const link_ends& x) const {
  std::lock_guard lock{mutex_};
  auto& from = nodes_[x.from].findings;
  return from.generation != 0 && from.peers[x.to].can_access;
}

bool topology_core::is_enabled(const link_ends& x) const {
  std::lock_guard lock{mutex_};
  caf::error reason;
  return access_of(x, reason) == peer_access::enabled;
}

caf::error topology_core::why_not_ready(const link_ends& x) const {
  std::lock_guard lock{mutex_};
  for (auto place : {x.from, x.to}) {
    if (is_connected(place))
      continue;
    auto& state = nodes_[place].on->state();
    if (auto why = state.reason())
      return why;
    return make_error({.code = errc::device_reset,
                       .detail = "the device was reset",
                       .device = state.ordinal(),
                       .generation = state.generation()});
  }
  return {};
}

std::optional<topology_core::link_life> topology_core::connected_in(const link_ends& x) const {
  std::lock_guard lock{mutex_};
  if (!is_connected(x.from) || !is_connected(x.to) || failure_to_connect(x))
    return std::nullopt;
  return life_of(x);
}

p2p_link topology_core::link_at(const link_ends& x) const {
  auto& e = edge_at(x);
  auto& from = nodes_[x.from].findings;
  p2p_link result;
  result.from = nodes_[x.from].on->state().ordinal();
  result.to = nodes_[x.to].on->state().ordinal();
  result.kind = e.link.kind;
  result.links = e.link.links;
  result.performance_rank = e.link.performance_rank;
  result.native_atomics = e.link.native_atomics;
  result.possible = from.generation != 0 && from.peers[x.to].can_access;
  result.access = access_of(x, result.reason);
  result.checked = e.checked;
  result.bandwidth = e.measured.bandwidth;
  result.bandwidth_both = e.measured.bandwidth_both;
  result.latency_us = e.measured.latency_us;
  return result;
}

p2p_graph topology_core::graph() const {
  std::lock_guard lock{mutex_};
  p2p_graph result;
  result.name = config_.name;
  result.version = version_;
  std::vector<std::size_t> living;
  for (std::size_t i = 0; i < size(); ++i) {
    if (has_ended(i))
      continue;
    auto& state = nodes_[i].on->state();
    result.devices.push_back({state.ordinal(), state.phase(), state.generation()});
    living.push_back(i);
  }
  for (auto& x : links_between(living))
    result.links.push_back(link_at(x));
  auto by_ordinals = [](auto& a, auto& b) { return a.device < b.device; };
  std::sort(result.devices.begin(), result.devices.end(), by_ordinals);
  std::sort(result.links.begin(), result.links.end(), [](const p2p_link& a, const p2p_link& b) {
    return std::pair{a.from, a.to} < std::pair{b.from, b.to};
  });
  result.settled =
      links_known_ &&
      std::none_of(result.devices.begin(), result.devices.end(),
                   [](const p2p_device& x) { return x.phase == device_phase::opening; }) &&
      std::none_of(result.links.begin(), result.links.end(),
                   [](const p2p_link& x) { return x.access == peer_access::pending; });
  find_islands(result);
  return result;
}

void topology_core::find_islands(p2p_graph& graph) const {
  auto reaches = [&](int from, int to) {
    auto* x = graph.link(from, to);
    return x->possible && (x->access == peer_access::enabled || x->access == peer_access::pending);
  };
  std::int32_t next = 0;
  for (auto& first : graph.devices) {
    if (first.island >= 0)
      continue;
    first.island = next++;
    for (bool grown = true; grown;) {
      grown = false;
      for (auto& x : graph.devices)
        if (x.island < 0 && std::any_of(
                                graph.devices.begin(), graph.devices.end(),
                                [&](const p2p_device& y) {
                                  return y.island == first.island && reaches(x.device, y.device) &&
                                         reaches(y.device, x.device);
                                })) {
          x.island = first.island;
          grown = true;
        }
    }
  }
}

std::vector<link_ends> topology_core::links_between(const std::vector<std::size_t>& indices) const {
  std::vector<link_ends> result;
  for (auto from : indices)
    for (auto to : indices)
      if (from != to)
        result.push_back({from, to});
  return result;
}

// -- changes

void topology_core::changed() {
  runtime_->admissions().go_on_soon(); // held copies may wait for this
  if (on_change_)
    on_change_();
}

void topology_core::note_change() {
  {
    std::lock_guard lock{mutex_};
    ++version_;
  }
  changed();
}

void topology_core::find_links() {
  std::vector<std::size_t> all(size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  runtime_->workers().run([self = shared_from_this(), links = links_between(all)] {
    std::vector<std::pair<link_ends, peer_link>> found;
    for (auto& x : links) {
      auto& from = self->lane_at(x.from).state();
      auto& to = self->lane_at(x.to).state();
      auto link = self->runtime_->backend().link(from.ordinal(), to.ordinal());
      if (link)
        found.emplace_back(x, *link);
      else
        log(log_level::warning, name_of(from, to) + " is unknown", link.error());
    }
    self->links_found(found);
  });
}

void topology_core::links_found(const std::vector<std::pair<link_ends, peer_link>>& all) {
  {
    std::lock_guard lock{mutex_};
    for (auto& [ends, link] : all)
      edge_at(ends).link = link;
    links_known_ = true;
    ++version_;
  }
  changed();
}

std::shared_ptr<connect_peers_operation> topology_core::start_connect(std::size_t place,
                                                                      clock::time_point deadline) {
  std::vector<int> peers;
  for (auto& x : nodes_)
    if (&x != &nodes_[place] && config_.use_links)
      peers.push_back(x.on->state().ordinal());
  auto op = std::make_shared<connect_peers_operation>(
      std::move(peers), [self = shared_from_this(), place](const peer_findings& found) {
        self->on_connected(place, found);
      });
  op->parts()[0].on = nodes_[place].on.get();
  op->deadline = deadline;
  runtime_->start(op);
  return op;
}

void topology_core::connect(std::size_t place) {
  static_cast<void>(start_connect(place, clock::time_point::max()));
}

void topology_core::on_connected(std::size_t place, const peer_findings& found) {
  {
    std::lock_guard lock{mutex_};
    auto& here = nodes_[place];
    here.findings.generation = found.generation;
    here.findings.incarnation = found.incarnation;
    here.findings.peers.assign(size(), {});
    auto next = found.peers.begin();
    for (std::size_t i = 0; i < size() && next != found.peers.end(); ++i)
      if (i != place)
        here.findings.peers[i] = *next++;
    note_routes();
    ++version_;
  }
  for (auto& x : found.peers)
    if (x.enabled)
      log(log_level::warning, "a device has no access to another one", x.enabled);
  changed();
}

void topology_core::mark_right(const link_ends& x, const link_life& in) {
  {
    std::lock_guard lock{mutex_};
    auto& e = edge_at(x);
    if (e.failures != in.failures)
      return;
    e.checked = link_check::right;
    e.right_in = in;
    e.out = {};
    note_routes();
    ++version_;
  }
  changed();
}

void topology_core::take_out(const link_ends& x, link_check found, const caf::error& why) {
  log(log_level::error,
      name_of(lane_at(x.from).state(), lane_at(x.to).state()) + " is not used any more", why);
  {
    std::lock_guard lock{mutex_};
    auto& e = edge_at(x);
    e.checked = found;
    ++e.failures;
    if (!e.out)
      links_failed_.fetch_add(1, std::memory_order_relaxed);
    e.out = why;
    note_routes();
    ++version_;
  }
  changed();
}

void topology_core::set_figures(const link_ends& x, const figures& measured) {
  {
    std::lock_guard lock{mutex_};
    edge_at(x).measured = measured;
    ++version_;
  }
  changed();
}

// -- requests

caf::expected<std::vector<std::size_t>>
topology_core::indices_of(const char* verb, const std::vector<std::int32_t>& devices) const {
  std::vector<std::size_t> result;
  if (devices.empty()) {
    for (std::size_t i = 0; i < size(); ++i)
      if (!has_ended(i))
        result.push_back(i);
    return result;
  }
  for (auto ordinal : devices) {
    auto i = std::find_if(nodes_.begin(), nodes_.end(),
                          [&](const node& x) { return x.on->state().ordinal() == ordinal; });
    if (i == nodes_.end())
      return refusal(verb, ordinal, errc::invalid_argument,
                     "device " + std::to_string(ordinal) + " is not in the topology");
    auto place = static_cast<std::size_t>(i - nodes_.begin());
    if (has_ended(place))
      return refusal(verb, ordinal, errc::unavailable, device_is(i->on->state().phase()));
    if (std::find(result.begin(), result.end(), place) == result.end())
      result.push_back(place);
  }
  return result;
}

/// Makes a request that no lane sees, but whose deadline is watched.
topology_core::answer topology_core::new_request(const char* verb, const request_options& options) {
  auto result = std::make_shared<operation_of<p2p_graph>>(verb, 0);
  result->deadline =
      from_now(options.deadline.count() != 0 ? options.deadline : config_.limits.deadline);
  auto refuse = [&](const caf::error& why) {
    result->answer(why);
    return result;
  };
  if (result->deadline <= clock::now())
    return refuse(result->late());
  caf::error closed;
  {
    std::lock_guard lock{mutex_};
    closed = closed_;
    std::erase_if(requests_, [](const auto& x) { return x.expired(); });
    requests_.push_back(result);
  }
  if (closed)
    return refuse(closed);
  runtime_->deadlines().add(*result);
  result->on_answer([owner = std::weak_ptr{runtime_}, weak = std::weak_ptr{result}] {
    if (auto alive = owner.lock())
      if (auto x = weak.lock())
        alive->deadlines().remove(*x);
  });
  return result;
}

topology_core::answer topology_core::start(const char* verb, test what,
                                           const std::vector<std::int32_t>& devices,
                                           const request_options& options) {
  if (auto error = check_no_retries(verb, options))
    return refused_operation<p2p_graph>(verb, std::move(error));
  auto indices = indices_of(verb, devices);
  if (!indices)
    return refused_operation<p2p_graph>(verb, indices.error());
  auto result = new_request(verb, options);
  if (!result->completed())
    run(what, result, links_between(*indices), {});
  return result;
}

void topology_core::run(test what, const answer& request, std::vector<link_ends> links,
                        std::function<void()> then) {
  runtime_->workers().run(
      [self = shared_from_this(), what, request, links = std::move(links), then = std::move(then)] {
        caf::error why;
        {
          std::lock_guard turn{self->one_test_};
          why = what(*self, request, links);
        }
        if (why && self->runtime_->ended())
          why = self->end_cause();
        if (!request->completed()) {
          request->value = self->graph();
          request->answer(why);
        }
        if (then)
          then();
      });
}

/// Returns the one cause, after all devices have ended.
caf::error topology_core::end_cause() const {
  for (auto& x : nodes_)
    if (auto why = x.on->state().reason())
      return why;
  return make_error(errc::unavailable, "the devices ended");
}

topology_core::answer topology_core::verify(const std::vector<std::int32_t>& devices,
                                            const request_options& options) {
  return start("verify_links", verify_all, devices, options);
}

topology_core::answer topology_core::measure(const std::vector<std::int32_t>& devices,
                                             const request_options& options) {
  return start("measure_links", measure_all, devices, options);
}

void topology_core::check_new_links() {
  std::vector<link_ends> links;
  {
    std::lock_guard lock{mutex_};
    if (checking_ || closed_)
      return;
    for (std::size_t from = 0; from < size(); ++from)
      for (std::size_t to = 0; to < size(); ++to)
        if (from != to && waits_for_check_locked({from, to}))
          links.push_back({from, to});
    if (links.empty())
      return;
    checking_ = true;
  }
  auto request = new_request("verify_links", {});
  run(check_new, request, std::move(links), [self = shared_from_this()] {
    {
      std::lock_guard lock{self->mutex_};
      self->checking_ = false;
      ++self->version_;
    }
    self->changed();
  });
}

void topology_core::close(const caf::error& why) {
  std::vector<std::weak_ptr<operation_of<p2p_graph>>> open;
  {
    std::lock_guard lock{mutex_};
    if (closed_)
      return;
    closed_ = why;
    is_closed_.store(true);
    open.swap(requests_);
  }
  for (auto& x : open)
    if (auto request = x.lock())
      request->answer(why);
  runtime_->admissions().go_on(); // held copies may wait for a link
}

} // namespace troupe::detail
