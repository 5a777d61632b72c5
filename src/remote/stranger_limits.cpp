#include "remote/stranger_limits.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <vector>

namespace troupe::detail {

namespace {

/// The part of an address that stands for its owner.
using network_part = std::array<std::byte, 8>;

network_part network_of(const socket_address& x) noexcept {
  network_part result{};
  std::copy_n(x.host.begin(), x.version == 4 ? 4 : result.size(), result.begin());
  return result;
}

} // namespace

stranger_limits limits_of(stranger_stage at, std::size_t descriptors) noexcept {
  constexpr std::size_t least = 4;
  const std::size_t most = at == stranger_stage::silent ? 256 : 64; // it costs only a descriptor
  const auto total = std::clamp(descriptors / 4, least, most);
  return {total, at == stranger_stage::authenticated ? total : total / 4}; // members may share one
}

std::optional<std::size_t> find_surplus(std::span<const stranger> present, stranger_stage at,
                                        const stranger_limits& limits, std::minstd_rand& random) {
  std::map<network_part, std::vector<std::size_t>> by_owner;
  std::size_t total = 0;
  for (std::size_t i = 0; i < present.size(); ++i)
    if (present[i].at == at) {
      by_owner[network_of(present[i].from)].push_back(i);
      ++total;
    }
  if (by_owner.empty())
    return std::nullopt;
  std::size_t most = 0;
  for (auto& [owner, x] : by_owner)
    most = std::max(most, x.size());
  if (most <= limits.per_address && total <= limits.total)
    return std::nullopt;
  std::vector<std::size_t> choice; // all of the addresses that have the most
  for (auto& [owner, x] : by_owner)
    if (x.size() == most)
      choice.insert(choice.end(), x.begin(), x.end());
  return choice[std::uniform_int_distribution<std::size_t>{0, choice.size() - 1}(random)];
}

} // namespace troupe::detail
