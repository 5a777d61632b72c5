#include "collective/collective_world.hpp"

#include <utility>

namespace troupe::detail {

namespace {

std::vector<std::size_t> local_ranks_of(const std::vector<std::shared_ptr<lane>>& lanes) {
  std::vector<std::size_t> result;
  for (std::size_t i = 0; i < lanes.size(); ++i)
    if (lanes[i])
      result.push_back(i);
  return result;
}

} // namespace

collective_world::collective_world(std::shared_ptr<runtime> runtime, const std::string& name,
                                   std::vector<std::shared_ptr<lane>> lanes,
                                   const world_limits& limits)
    : runtime_(std::move(runtime)), tag_(make_world_tag(name)), lanes_(std::move(lanes)),
      local_ranks_(local_ranks_of(lanes_)), limits_(limits), matching_(lanes_.size()) {}

} // namespace troupe::detail
