/// Where hosts find each other.
#pragma once

#include "backend/host/socket.hpp"

#include <chrono>
#include <string>

namespace troupe::detail {

/// The two ends of a connection, as the system names them.
/// @errors errc::unavailable
caf::expected<socket_address> own_end(const file_descriptor& socket);
caf::expected<socket_address> other_end(const file_descriptor& socket);

/// Without the port: what `address_from_string` takes.
std::string host_text(const socket_address& x);

/// Connects to "host:port", where host is a name or a number; an IPv6 number stands in brackets.
/// @errors errc::invalid_argument: no such text; errc::unavailable: no such host, or nobody listens
caf::expected<file_descriptor> connect_to_name(const std::string& where,
                                               std::chrono::steady_clock::time_point until);

/// What `connect_to_name` would take.
/// @errors errc::invalid_argument
caf::error check_name(const std::string& where);

} // namespace troupe::detail
