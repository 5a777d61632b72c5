#include "foundation/enum_name.hpp"
#include "foundation/never_destroyed.hpp"
#include <troupe/error.hpp>
#include <troupe/launch.hpp>

#include <map>
#include <mutex>
#include <utility>

namespace troupe {

namespace {

struct launch_registry {
  std::mutex mutex;
  std::map<std::string, registered_launch, std::less<>> launches;
};

launch_registry& launches() { return detail::never_destroyed<launch_registry>(); }

} // namespace

caf::error register_launch(std::string name, registered_launch function) {
  auto& all = launches();
  std::lock_guard lock{all.mutex};
  if (!function || name.empty())
    return make_error(errc::invalid_argument, "a launch needs a name and a function");
  if (!all.launches.try_emplace(name, std::move(function)).second)
    return make_error(errc::invalid_argument, "the launch name " + name + " is taken");
  return {};
}

std::string_view to_string(access_mode x) noexcept { return detail::enum_name(x); }

registered_launch find_launch(const std::string& name) {
  auto& all = launches();
  std::lock_guard lock{all.mutex};
  auto i = all.launches.find(name);
  return i != all.launches.end() ? i->second : registered_launch{};
}

} // namespace troupe
