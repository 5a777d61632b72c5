/// The names of the phases and policies of a world, and the status that an error carries.
#include "foundation/enum_name.hpp"
#include <troupe/error.hpp>
#include <troupe/world_status.hpp>

#include <optional>
#include <string_view>

namespace troupe {

std::string_view to_string(world_phase x) noexcept { return detail::enum_name(x); }

std::string_view to_string(standby_policy x) noexcept { return detail::enum_name(x); }
std::string_view to_string(collectives_policy x) noexcept { return detail::enum_name(x); }

std::string_view to_string(loss_policy x) noexcept { return detail::enum_name(x); }

std::optional<world_status> status_of(const caf::error& e) {
  if (code_of(e) != errc::membership_changed)
    return std::nullopt;
  auto& context = e.context();
  if (context.size() < 2 || !context.match_element<world_status>(1))
    return std::nullopt;
  return context.get_as<world_status>(1);
}

} // namespace troupe
