#include "foundation/never_destroyed.hpp"

#include <mutex>
#include <utility>
#include <vector>

namespace troupe::detail {

namespace {

struct kept_objects {
  std::mutex mutex;
  std::vector<std::shared_ptr<void>> all;
};

} // namespace

void keep_forever(std::shared_ptr<void> x) {
  auto& kept = never_destroyed<kept_objects>();
  std::lock_guard lock{kept.mutex};
  kept.all.push_back(std::move(x));
}

} // namespace troupe::detail
