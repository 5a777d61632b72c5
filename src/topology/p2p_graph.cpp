#include "foundation/enum_name.hpp"
#include <troupe/p2p_graph.hpp>

#include <algorithm>

namespace troupe {

std::string_view to_string(link_kind x) noexcept { return detail::enum_name(x); }

std::string_view to_string(peer_access x) noexcept { return detail::enum_name(x); }

std::string_view to_string(link_check x) noexcept { return detail::enum_name(x); }

const p2p_link* p2p_graph::link(int from, int to) const noexcept {
  auto i = std::find_if(links.begin(), links.end(),
                        [&](const p2p_link& x) { return x.from == from && x.to == to; });
  return i != links.end() ? &*i : nullptr;
}

const p2p_device* p2p_graph::device(int ordinal) const noexcept {
  auto i = std::find_if(devices.begin(), devices.end(),
                        [&](const p2p_device& x) { return x.device == ordinal; });
  return i != devices.end() ? &*i : nullptr;
}

std::vector<std::vector<std::int32_t>> p2p_graph::islands() const {
  std::vector<std::vector<std::int32_t>> result;
  for (auto& x : devices) {
    auto place = static_cast<std::size_t>(x.island);
    if (x.island < 0)
      continue;
    if (result.size() <= place)
      result.resize(place + 1);
    result[place].push_back(x.device);
  }
  return result;
}

} // namespace troupe
