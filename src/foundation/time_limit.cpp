#include "foundation/time_limit.hpp"

#include <algorithm>
#include <limits>

namespace troupe::detail {

int poll_limit(time_limit until) noexcept {
  if (until == no_limit)
    return -1;
  const auto left = until - std::chrono::steady_clock::now();
  const auto ms = std::chrono::ceil<std::chrono::milliseconds>(left).count();
  constexpr decltype(ms) most = std::numeric_limits<int>::max();
  return static_cast<int>(std::clamp<decltype(+ms)>(ms, 0, most));
}

} // namespace troupe::detail
