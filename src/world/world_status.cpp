/// The names of the phases and policies of a world, and the status that an error carries.
#include <troupe/error.hpp>
#include <troupe/world_status.hpp>

#include <optional>
#include <string_view>

namespace troupe {

std::string_view to_string(world_phase x) noexcept {
  switch (x) {
  case world_phase::building:
    return "building";
  case world_phase::ready:
    return "ready";
  case world_phase::failed:
    return "failed";
  case world_phase::shut_down:
    return "shut_down";
  }
  return "unknown";
}

std::string_view to_string(standby_policy x) noexcept {
  switch (x) {
  case standby_policy::none:
    return "none";
  case standby_policy::same:
    return "same";
  case standby_policy::survivors:
    return "survivors";
  case standby_policy::full:
    return "full";
  }
  return "unknown";
}

std::string_view to_string(loss_policy x) noexcept {
  switch (x) {
  case loss_policy::automatic:
    return "automatic";
  case loss_policy::failover:
    return "failover";
  case loss_policy::shrink:
    return "shrink";
  case loss_policy::rebuild:
    return "rebuild";
  case loss_policy::fail:
    return "fail";
  }
  return "unknown";
}

std::optional<world_status> status_of(const caf::error& e) {
  if (code_of(e) != errc::membership_changed)
    return std::nullopt;
  auto& context = e.context();
  if (context.size() < 2 || !context.match_element<world_status>(1))
    return std::nullopt;
  return context.get_as<world_status>(1);
}

} // namespace troupe
