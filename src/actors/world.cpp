#include "actors/answer.hpp"
#include "actors/device_access.hpp"
#include "actors/messages.hpp"
#include "actors/supervised.hpp"
#include "foundation/error_text.hpp"
#include "foundation/never_destroyed.hpp"
#include <troupe/world.hpp>
#include <troupe/world_rank.hpp>

#include <caf/all.hpp>

#include <algorithm>
#include <climits>
#include <string>
#include <utility>

namespace troupe {

struct world::owner {
  explicit owner(detail::world_parts p) : parts(std::move(p)) {}
  ~owner() {
    if (parts.actor) // else its supervisor is in another process
      caf::anon_send_exit(parts.actor, caf::exit_reason::user_shutdown);
  }
  owner(const owner&) = delete;
  owner& operator=(const owner&) = delete;

  const detail::world_parts parts;
};

caf::error detail::why_empty_world() {
  return make_error(errc::invalid_argument, "there is no world: this object is empty");
}

pending<collective_done> detail::refused_by_empty_world(const char* verb) {
  return answer(refused_operation<collective_done>(verb, why_empty_world()));
}

const detail::world_parts& detail::world_access::parts_of(const world& x) noexcept {
  return x.owner_ ? x.owner_->parts : never_destroyed<world_parts>();
}

world detail::world_access::make(world_parts parts) {
  return world{std::make_shared<const world::owner>(std::move(parts))};
}

namespace {

/// Blocks until the world is built, or has failed, at most for its build deadline.
caf::error wait_until_ready(caf::actor_system& sys, const caf::actor& world) {
  caf::scoped_actor self{sys};
  auto now = detail::ask<world_status>(self, world, caf::infinite, detail::until_built{});
  if (!now)
    return now.error();
  return now->phase == world_phase::ready ? caf::error{} : now->reason;
}

} // namespace

caf::expected<world> world::open(caf::actor_system& sys, world_config config) {
  if (auto refused = detail::check_may_block(); refused)
    return refused;
  auto parts = detail::make_world(sys, std::move(config));
  if (!parts)
    return parts.error();
  world result{std::make_shared<const owner>(std::move(*parts))};
  if (auto error = wait_until_ready(sys, result.actor()); error)
    return error;
  return result;
}

caf::expected<world> world::open(const std::vector<device>& devices, world_config config) {
  auto sys = detail::system_of(devices, config.devices, "a world");
  if (!sys)
    return sys.error();
  return open(**sys, std::move(config));
}

caf::expected<std::vector<world>> world::split(std::string name, std::vector<std::int32_t> colors,
                                               std::vector<std::int32_t> keys,
                                               const std::optional<world_limits>& limits) const {
  if (auto refused = detail::check_may_block(); refused)
    return refused;
  if (!owner_)
    return detail::why_empty_world();
  auto& sys = owner_->parts.lease->system;
  auto& core = *owner_->parts.core;
  auto groups =
      detail::split_world(sys, core, {std::move(name), std::move(colors), std::move(keys), {}},
                          limits.value_or(core.limits()));
  if (!groups)
    return groups.error();
  std::vector<world> result;
  for (auto& x : *groups)
    result.push_back(world{std::make_shared<const owner>(std::move(x.parts))});
  for (auto& x : result) // they build at the same time
    if (auto error = wait_until_ready(sys, x.actor()); error)
      return error;
  return result;
}

std::size_t world::size() const noexcept { return owner_ ? owner_->parts.core->size() : 0; }

world_status world::status() const {
  if (owner_)
    return owner_->parts.core->status();
  world_status result;
  result.phase = world_phase::failed;
  result.reason = detail::why_empty_world();
  return result;
}

const caf::actor& world::actor() const noexcept {
  return detail::world_access::parts_of(*this).actor;
}

device world::device_of(std::size_t rank) const {
  if (!owner_)
    return detail::device_access::none(detail::why_empty_world());
  auto& core = *owner_->parts.core;
  if (rank >= core.size() || !core.lanes()[rank])
    return detail::device_access::none(core.why_no_device_of(rank));
  return detail::device_access::make(owner_->parts.lease, core.owner(), core.lanes()[rank]);
}

caf::expected<std::vector<any_gpu_ref>> world::allocate(dtype type, std::size_t count,
                                                        allocation_options what,
                                                        request_options options) const {
  if (auto refused = detail::check_may_block(); refused)
    return refused;
  if (!owner_)
    return detail::why_empty_world();
  auto all = answer(owner_->parts.core->allocate(type, count, what, options)).wait();
  if (!all)
    return all.error();
  return std::move(all->refs);
}

pending<collective_done> world::all_reduce(const std::vector<any_gpu_ref>& send,
                                           const std::vector<any_gpu_ref>& recv, reduce_op op,
                                           request_options options) const {
  if (recv.empty())
    return out_of_place(troupe::all_reduce{send, recv, op, {}, {}}, options);
  if (!owner_)
    return detail::refused_by_empty_world("all_reduce");
  return answer(
      owner_->parts.core->run({collective_kind::all_reduce, send, recv, op, {}}, options));
}

pending<collective_done> world::all_reduce_in_place(const std::vector<any_gpu_ref>& buffers,
                                                    reduce_op op, request_options options) const {
  if (!owner_)
    return detail::refused_by_empty_world("all_reduce");
  return answer(
      owner_->parts.core->run({collective_kind::all_reduce, buffers, {}, op, {}}, options));
}

pending<collective_done> world::out_of_place(const collective& what,
                                             request_options options) const {
  if (!owner_ || (!what.send.empty() && !what.recv.empty()))
    return run(what, options);
  const auto* verb = to_string(what.kind).data();
  return answer(detail::refused_operation<collective_done>(
      verb, detail::refusal(verb, errc::invalid_argument,
                            "0 buffers for " + std::to_string(size()) + " ranks")));
}

pending<collective_done> world::run(const collective& what, request_options options) const {
  if (!owner_)
    return detail::refused_by_empty_world(to_string(what.kind).data());
  return answer(owner_->parts.core->run(detail::collective_view{what}, options));
}

pending<collective_done> world::run(const group& what) const {
  if (!owner_)
    return detail::refused_by_empty_world("group");
  return answer(owner_->parts.core->run(what));
}

world_rank world::rank(std::size_t index) const { return {*this, index}; }

} // namespace troupe
