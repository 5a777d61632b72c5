#include "operation/launch_registry.hpp"

#include "foundation/enum_name.hpp"
#include "foundation/never_destroyed.hpp"
#include <troupe/error.hpp>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>
#include <variant>

namespace troupe {

namespace {

using any_launch = std::variant<registered_launch, std::shared_ptr<const library_launch>>;

struct known_launch {
  any_launch what;
  repetition repeats = repetition::calls;
};

struct launch_registry {
  std::mutex mutex;
  std::map<std::string, known_launch, std::less<>> launches;
  std::vector<std::pair<std::string, library_maker>> libraries;
};

launch_registry& launches() { return detail::never_destroyed<launch_registry>(); }

caf::error add_launch(std::string name, bool is_callable, known_launch x) {
  auto& all = launches();
  std::lock_guard lock{all.mutex};
  if (!is_callable || name.empty())
    return make_error(errc::invalid_argument, "a launch needs a name and a function");
  if (!all.launches.try_emplace(name, std::move(x)).second)
    return make_error(errc::invalid_argument, "the launch name " + name + " is taken");
  return {};
}

/// Returns the launch of that name and type; an empty one if there is none.
template <class T> T find_as(const std::string& name) {
  auto& all = launches();
  std::lock_guard lock{all.mutex};
  const auto i = all.launches.find(name);
  const auto* found = i != all.launches.end() ? std::get_if<T>(&i->second.what) : nullptr;
  return found != nullptr ? *found : T{};
}

} // namespace

caf::error register_launch(std::string name, registered_launch function, repetition repeats) {
  const bool is_callable = function != nullptr;
  return add_launch(std::move(name), is_callable, {std::move(function), repeats});
}

caf::error register_launch(std::string name, library_launch launch) {
  const bool is_callable = launch.enqueue != nullptr;
  const auto repeats = launch.judge ? repetition::calls : launch.repeats;
  return add_launch(std::move(name), is_callable,
                    {std::make_shared<const library_launch>(std::move(launch)), repeats});
}

caf::error register_library(std::string name, library_maker make) {
  auto& all = launches();
  std::lock_guard lock{all.mutex};
  if (!make || name.empty())
    return make_error(errc::invalid_argument, "a library needs a name and a function");
  if (std::ranges::count(all.libraries, name, [](auto& x) { return x.first; }) != 0)
    return make_error(errc::invalid_argument, "the library name " + name + " is taken");
  all.libraries.emplace_back(std::move(name), std::move(make));
  return {};
}

std::string_view to_string(access_mode x) noexcept { return detail::enum_name(x); }

registered_launch find_launch(const std::string& name) { return find_as<registered_launch>(name); }

namespace detail {

std::shared_ptr<const library_launch> find_library_launch(const std::string& name) {
  return find_as<std::shared_ptr<const library_launch>>(name);
}

bool replays(const std::string& name) {
  auto& all = launches();
  std::lock_guard lock{all.mutex};
  const auto i = all.launches.find(name);
  return i != all.launches.end() && i->second.repeats == repetition::replays;
}

std::vector<std::pair<std::string, library_maker>> registered_libraries() {
  auto& all = launches();
  std::lock_guard lock{all.mutex};
  return all.libraries;
}

} // namespace detail

} // namespace troupe
