#include "actors/supervised.hpp"
#include "foundation/error_text.hpp"
#include "foundation/option_check.hpp"
#include "mesh/mesh_calls.hpp"
#include "mesh/mesh_channel.hpp"
#include <troupe/mesh_comm.hpp>

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>

namespace troupe {

namespace {

/// @units bytes of the largest element
constexpr std::size_t largest_element = 8;
constexpr std::size_t most_chunks = 1024;

/// A rank's place in a group. Its channels are made when they are first needed.
struct membership_in {
  world over;
  int rank = 0;
  std::shared_ptr<detail::mesh_calls> calls;
  /// By direction and peer; for collectives: barrier and -1.
  std::map<std::pair<collective_kind, int>, std::shared_ptr<detail::mesh_channel>> channels;
};

caf::error refusal(collective_kind what, std::string why) {
  return detail::refusal(to_string(what), errc::invalid_argument, std::move(why));
}

bool overlap(std::span<const std::byte> a, std::span<const std::byte> b) {
  std::less<const std::byte*> before;
  return !a.empty() && !b.empty() && before(a.data(), b.data() + b.size()) &&
         before(b.data(), a.data() + a.size());
}

detail::host_side side_of(const host_source& x) {
  // Memory to send is only read.
  return {{const_cast<std::byte*>(x.bytes().data()), x.bytes().size()}, x.owner()};
}

detail::host_side side_of(const host_target& x) { return {x.bytes(), x.owner()}; }

std::string family_of(const std::string& name) { return name.substr(0, name.rfind('/')); }

} // namespace

struct mesh_comm::state {
  state(world x, int r, detail::mesh_buffering b) : all(std::move(x)), rank(r), buffering(b) {}
  ~state() {
    for (auto& [name, in] : groups)
      for (auto& [line, channel] : in->channels)
        channel->close();
    for (auto& [name, in] : groups)
      in->calls->close(in->rank);
  }
  state(const state&) = delete;
  state& operator=(const state&) = delete;

  caf::error add(const std::string& name, const std::shared_ptr<membership_in>& in) {
    if (!groups.try_emplace(name, in).second)
      return make_error(errc::invalid_argument,
                        "rank " + std::to_string(rank) + " is in two groups of the name " + name);
    if (auto family = family_of(name); family != name)
      if (auto [i, first] = families.try_emplace(std::move(family), in); !first)
        i->second = nullptr;
    return {};
  }

  caf::expected<std::shared_ptr<membership_in>> find(std::string_view name) const {
    if (auto i = groups.find(name); i != groups.end())
      return i->second;
    if (auto i = families.find(name); i != families.end() && i->second)
      return i->second;
    return make_error(errc::invalid_argument, "rank " + std::to_string(rank) +
                                                  " is in no group, or several, of the name " +
                                                  std::string{name});
  }

  std::shared_ptr<detail::mesh_channel> channel(membership_in& in, const detail::mesh_spec& spec) {
    std::pair line{collective_kind::barrier, -1};
    if (spec.is_message())
      line = {spec.what, spec.peer};
    std::lock_guard lock{mutex};
    auto& result = in.channels[line];
    if (!result)
      result = std::make_shared<detail::mesh_channel>(detail::world_access::core_of(in.over),
                                                      in.rank, in.calls, buffering);
    return result;
  }

  pending<void> start(const detail::mesh_spec& spec, detail::host_side send, detail::host_side recv,
                      const mesh_options& options);

  const world all;
  const int rank;
  const detail::mesh_buffering buffering;
  std::map<std::string, std::shared_ptr<membership_in>, std::less<>> groups;
  std::map<std::string, std::shared_ptr<membership_in>, std::less<>> families; // null: several
  std::mutex mutex;                                                            // of the channels
};

namespace {

caf::error check_root(const membership_in& in, const detail::mesh_spec& spec) {
  auto n = static_cast<int>(in.over.size());
  bool needs = spec.is_message() || spec.what == collective_kind::broadcast;
  if (needs && (spec.peer < 0 || spec.peer >= n))
    return refusal(spec.what, detail::out_of_range(spec.is_message() ? "rank" : "root", spec.peer,
                                                   in.over.size()));
  if (spec.is_message() && spec.peer == in.rank)
    return refusal(spec.what, "rank " + std::to_string(in.rank) + " has no messages with itself");
  return {};
}

/// Sets the count of elements for `bytes` that are `n` equal blocks.
caf::error count_elements(detail::mesh_spec& spec, std::size_t bytes, std::size_t n) {
  if (!is_dtype(spec.type))
    return refusal(spec.what, detail::unknown_dtype(spec.type));
  auto one = size_of(spec.type) * n;
  if (bytes % one != 0)
    return refusal(spec.what, std::to_string(bytes) + " bytes are not a whole number of " +
                                  std::string{to_string(spec.type)} +
                                  (n == 1 ? "" : " for each of " + std::to_string(n) + " ranks"));
  spec.count = bytes / one;
  return {};
}

/// Checks the sizes and addresses of the memory that a rank sends and receives; the larger one has
/// `n` blocks.
caf::error check_blocks(const membership_in& in, const detail::mesh_spec& spec,
                        std::span<const std::byte> one, std::span<const std::byte> many,
                        std::size_t n) {
  if (many.size() != n * one.size())
    return refusal(spec.what, std::to_string(one.size()) + " and " + std::to_string(many.size()) +
                                  " bytes for " + std::to_string(n) + " blocks");
  auto offset = n == 1 ? 0 : static_cast<std::size_t>(in.rank) * one.size();
  if (one.data() != many.data() + offset && overlap(one, many))
    return refusal(spec.what, "the send and receive memory overlap");
  return {};
}

} // namespace

pending<void> mesh_comm::state::start(const detail::mesh_spec& given, detail::host_side send,
                                      detail::host_side recv, const mesh_options& options) {
  auto spec = given;
  auto in = find(options.group);
  if (!in)
    return pending<void>{refusal(spec.what, describe(in.error()))};
  auto& group = **in;
  if (auto error = check_root(group, spec); error)
    return pending<void>{std::move(error)};
  if (spec.op == reduce_op::premul_sum)
    return pending<void>{refusal(spec.what, "premul_sum needs factors, which a mesh_comm has not")};
  auto n = group.over.size();
  bool gathers = spec.what == collective_kind::all_gather;
  bool scatters = spec.what == collective_kind::reduce_scatter;
  auto& larger = send.memory.size() > recv.memory.size() ? send : recv;
  if (auto error = count_elements(spec, larger.memory.size(), gathers || scatters ? n : 1); error)
    return pending<void>{std::move(error)};
  caf::error wrong;
  if (gathers)
    wrong = check_blocks(group, spec, send.memory, recv.memory, n);
  else if (scatters)
    wrong = check_blocks(group, spec, recv.memory, send.memory, n);
  else if (spec.what == collective_kind::all_reduce)
    wrong = check_blocks(group, spec, send.memory, recv.memory, 1);
  if (wrong)
    return pending<void>{std::move(wrong)};
  if (spec.what == collective_kind::broadcast)
    (spec.peer == group.rank ? recv : send) = {};
  auto request = std::make_shared<detail::mesh_request>();
  request->spec = spec;
  request->send = std::move(send);
  request->recv = std::move(recv);
  request->membership = options.membership;
  auto& limits = detail::world_access::core_of(group.over)->limits();
  request->deadline =
      detail::from_now(options.deadline.count() != 0 ? options.deadline : limits.deadline);
  channel(group, spec)->post(request);
  return {std::move(request), nullptr};
}

caf::expected<std::vector<mesh_comm>> mesh_comm::open(const world& all, mesh_config config) {
  if (auto error = detail::check_option("mesh_config::chunks", detail::as_signed(config.chunks), 1,
                                        detail::as_signed(most_chunks)))
    return error;
  if (auto error =
          detail::check_at_least("mesh_config::chunk_bytes", detail::as_signed(config.chunk_bytes),
                                 detail::as_signed(largest_element * all.size())))
    return error;
  if (!detail::world_access::core_of(all))
    return detail::why_empty_world();
  for (auto& group : config.groups)
    if (!detail::world_access::core_of(group))
      return detail::why_empty_world();
  if (!detail::world_access::core_of(all)->is_whole())
    return make_error(errc::not_supported, "the devices of other ranks are in other processes");
  std::map<const detail::lane*, std::shared_ptr<state>> by_device;
  std::vector<mesh_comm> result;
  auto& ranks = detail::world_access::core_of(all)->lanes();
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    auto who = std::make_shared<state>(all, static_cast<int>(i),
                                       detail::mesh_buffering{config.chunk_bytes, config.chunks});
    by_device.emplace(ranks[i].get(), who);
    result.push_back(mesh_comm{std::move(who)});
  }
  auto enter = [&](const world& group, const std::string& name) -> caf::error {
    auto& lanes = detail::world_access::core_of(group)->lanes();
    std::vector<std::shared_ptr<detail::device_state>> devices;
    for (auto& x : lanes)
      devices.push_back(x->shared_state());
    auto calls = std::make_shared<detail::mesh_calls>(devices);
    for (std::size_t i = 0; i < lanes.size(); ++i) {
      auto who = by_device.find(lanes[i].get());
      if (who == by_device.end())
        return make_error(errc::invalid_argument,
                          "device " + std::to_string(lanes[i]->state().ordinal()) + " of group " +
                              name + " is in no rank of the mesh");
      auto in =
          std::make_shared<membership_in>(membership_in{group, static_cast<int>(i), calls, {}});
      if (auto error = who->second->add(name, in); error)
        return error;
    }
    return {};
  };
  if (auto error = enter(all, ""); error)
    return error;
  for (auto& group : config.groups)
    if (auto error = enter(group, detail::world_access::core_of(group)->name()); error)
      return error;
  return result;
}

int mesh_comm::rank() const noexcept { return state_->rank; }

std::size_t mesh_comm::size() const noexcept { return state_->all.size(); }

caf::expected<int> mesh_comm::rank(std::string_view group) const {
  auto in = state_->find(group);
  if (!in)
    return in.error();
  return (*in)->rank;
}

caf::expected<std::size_t> mesh_comm::size(std::string_view group) const {
  auto in = state_->find(group);
  if (!in)
    return in.error();
  return (*in)->over.size();
}

device mesh_comm::where() const {
  return state_->all.device_of(static_cast<std::size_t>(state_->rank));
}

pending<void> mesh_comm::all_reduce(host_target buffer, dtype type, reduce_op op,
                                    mesh_options options) const {
  auto side = side_of(buffer);
  return state_->start({collective_kind::all_reduce, type, 0, op, -1}, side, side, options);
}

pending<void> mesh_comm::all_reduce(host_source send, host_target recv, dtype type, reduce_op op,
                                    mesh_options options) const {
  return state_->start({collective_kind::all_reduce, type, 0, op, -1}, side_of(send), side_of(recv),
                       options);
}

pending<void> mesh_comm::broadcast(host_target buffer, dtype type, int root,
                                   mesh_options options) const {
  auto side = side_of(buffer);
  return state_->start({collective_kind::broadcast, type, 0, reduce_op::sum, root}, side, side,
                       options);
}

pending<void> mesh_comm::all_gather(host_source send, host_target recv, dtype type,
                                    mesh_options options) const {
  return state_->start({collective_kind::all_gather, type, 0, reduce_op::sum, -1}, side_of(send),
                       side_of(recv), options);
}

pending<void> mesh_comm::reduce_scatter(host_source send, host_target recv, dtype type,
                                        reduce_op op, mesh_options options) const {
  return state_->start({collective_kind::reduce_scatter, type, 0, op, -1}, side_of(send),
                       side_of(recv), options);
}

pending<void> mesh_comm::send(host_source buffer, dtype type, int to, mesh_options options) const {
  return state_->start({collective_kind::send, type, 0, reduce_op::sum, to}, side_of(buffer), {},
                       options);
}

pending<void> mesh_comm::recv(host_target buffer, dtype type, int from,
                              mesh_options options) const {
  return state_->start({collective_kind::recv, type, 0, reduce_op::sum, from}, {}, side_of(buffer),
                       options);
}

pending<void> mesh_comm::barrier(mesh_options options) const {
  return state_->start({}, {}, {}, options);
}

} // namespace troupe
