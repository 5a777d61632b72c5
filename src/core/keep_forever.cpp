#include "core/keep_forever.hpp"

#include <mutex>
#include <utility>
#include <vector>

namespace troupe::detail {

void keep_forever(std::shared_ptr<void> x) {
  static std::mutex mutex;
  static auto* kept = new std::vector<std::shared_ptr<void>>;
  std::lock_guard lock{mutex};
  kept->push_back(std::move(x));
}

} // namespace troupe::detail
