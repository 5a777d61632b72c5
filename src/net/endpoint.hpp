/// Connections by name.
#pragma once

#include "net/socket.hpp"

#include <chrono>
#include <string>

namespace troupe::detail {

/// Connects to "host:port", where host is a name or an address; an IPv6 address is in brackets.
/// @errors errc::invalid_argument: not of this form; errc::unavailable: no such host, or no
///         connection
caf::expected<file_descriptor> connect_to_name(const std::string& where,
                                               std::chrono::steady_clock::time_point until);

/// Checks the form of a text for `connect_to_name`.
/// @errors errc::invalid_argument
caf::error check_name(const std::string& where);

} // namespace troupe::detail
