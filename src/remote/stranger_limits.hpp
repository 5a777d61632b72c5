/// How many strangers a port keeps, and which of them go if there are more.
#pragma once

#include "net/socket.hpp"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <span>

namespace troupe::detail {

/// How far a connection of a stranger has come.
enum class stranger_stage : std::uint8_t {
  silent,       ///< its first message is not here yet
  waiting,      ///< its first message is here, and waits for its turn
  handshake,    ///< its certificate is not known yet
  authenticated ///< it has a certificate of the authority, and has not sent its name yet
};

struct stranger {
  socket_address from;
  stranger_stage at = stranger_stage::silent;
};

/// The most strangers of one stage, in all and from one address.
struct stranger_limits {
  std::size_t total = 0;
  std::size_t per_address = 0;
};

/// Returns the limits of a stage, for a process that may have so many file descriptors.
stranger_limits limits_of(stranger_stage at, std::size_t descriptors) noexcept;

/// Returns the index of the stranger that must go if there are too many of the stage `at`: one at
/// random of the addresses that have the most. That is also the case if one has more than its
/// share. Addresses of IP version 6 count as one if they differ in their last 64 bits only.
/// @return none if there are not too many
std::optional<std::size_t> find_surplus(std::span<const stranger> present, stranger_stage at,
                                        const stranger_limits& limits, std::minstd_rand& random);

} // namespace troupe::detail
