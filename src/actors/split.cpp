#include "actors/supervised.hpp"
#include "foundation/error_text.hpp"

#include <caf/all.hpp>

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>

namespace troupe::detail {

namespace {

caf::error check_numbers(const char* what, std::size_t number, std::size_t ranks) {
  if (number == ranks)
    return {};
  return refusal("split", errc::invalid_argument,
                 std::to_string(number) + ' ' + what + " for " + std::to_string(ranks) + " ranks");
}

caf::error check(const world_core& core, const split& what) {
  if (!core.is_whole())
    return refusal("split", errc::not_supported,
                   "the devices of other ranks are in other processes");
  if (what.name.empty())
    return refusal("split", errc::invalid_argument, "the name of the groups is empty");
  if (auto error = check_numbers("colors", what.colors.size(), core.size()); error)
    return error;
  if (!what.keys.empty())
    if (auto error = check_numbers("keys", what.keys.size(), core.size()); error)
      return error;
  if (auto error = core.check_view("split", what.options.membership); error)
    return error;
  for (std::size_t i = 0; i < core.size(); ++i) {
    auto& device = core.lanes()[i]->state();
    if (what.colors[i] >= 0 && device.phase() > device_phase::resetting)
      return refusal("split", errc::unavailable,
                     "device " + std::to_string(device.ordinal()) + " is " +
                         std::string{to_string(device.phase())});
  }
  return {};
}

std::map<std::int32_t, std::vector<std::int32_t>> ranks_by_color(const split& what) {
  std::map<std::int32_t, std::vector<std::int32_t>> result;
  for (std::size_t i = 0; i < what.colors.size(); ++i)
    if (what.colors[i] >= 0)
      result[what.colors[i]].push_back(static_cast<std::int32_t>(i));
  auto key = [&](std::int32_t rank) { return what.keys[static_cast<std::size_t>(rank)]; };
  if (!what.keys.empty())
    for (auto& [color, ranks] : result)
      std::stable_sort(ranks.begin(), ranks.end(), [&](auto a, auto b) { return key(a) < key(b); });
  return result;
}

} // namespace

caf::expected<std::vector<world_group>> split_world(caf::actor_system& sys, const world_core& core,
                                                    const split& what, const world_limits& limits) {
  if (auto error = check(core, what); error)
    return error;
  std::vector<world_group> result;
  for (auto& [color, ranks] : ranks_by_color(what)) {
    world_config config;
    config.name = what.name + '/' + std::to_string(color);
    config.limits = limits;
    config.collectives = core.wanted_collectives();
    config.ways = core.wanted_ways();
    for (auto rank : ranks)
      config.devices.push_back(core.lanes()[static_cast<std::size_t>(rank)]->state().ordinal());
    auto name = config.name;
    auto parts = make_world(sys, std::move(config));
    if (!parts) {
      for (auto& x : result)
        caf::anon_send_exit(x.parts.actor, caf::exit_reason::user_shutdown);
      return parts.error();
    }
    result.push_back({color, std::move(name), ranks, std::move(*parts)});
  }
  return result;
}

} // namespace troupe::detail
