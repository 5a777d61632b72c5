/// The role of a communicator in its world.
#pragma once

#include <cstdint>

namespace troupe::detail {

enum class communicator_role : std::uint8_t {
  next,    ///< being connected
  live,    ///< requests run on it
  standby, ///< idle, until the live one ends
  beside,  ///< requests of another way than most run on it
};

} // namespace troupe::detail
