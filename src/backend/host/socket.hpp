/// Sockets of TCP, and what goes through them.
#pragma once

#include "core/file_descriptor.hpp"
#include <troupe/error.hpp>

#include <caf/error.hpp>
#include <caf/expected.hpp>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

namespace troupe::detail {

/// Where a socket listens; the same bytes mean the same in every process.
struct socket_address {
  std::array<std::byte, 16> host{}; ///< in network order; of IPv4 the first four
  std::uint16_t port = 0;
  std::uint16_t version = 4; ///< of IP: 4 or 6

  friend bool operator==(const socket_address&, const socket_address&) = default;
};

std::string to_string(const socket_address& x);

/// The address of one host, without a port.
/// @errors errc::invalid_argument: not the number of one host
caf::expected<socket_address> address_from_string(const std::string& text);

/// Listens at the port that `at` names; if it is 0, at one that is free, which is put there.
/// @errors errc::unavailable
caf::expected<file_descriptor> listen_at(socket_address& at);

/// @errors errc::nccl_error: nobody listens there, or there is no way before `until`
caf::expected<file_descriptor> connect_to(const socket_address& to,
                                          std::chrono::steady_clock::time_point until);

/// What `listener` has; none, with `errno`, if it has nothing or there are too many files.
/// @shape `listener` does not block; the result does
file_descriptor accept_from(const file_descriptor& listener);

/// Sends all; blocks.
/// @return 0, or `errno`
int send_all(int socket, std::span<const std::span<const std::byte>> blocks) noexcept;

/// Sends `bytes` if all of it finds room at once; what went of it is not told.
bool send_at_once(int socket, std::span<const std::byte> bytes) noexcept;

/// Fills all blocks; blocks. False: the other side has ended the connection, or it is lost.
bool receive_all(int socket, std::span<const std::span<std::byte>> blocks) noexcept;

/// What is there now: the number of bytes; 0: the connection is over; -1: nothing yet.
/// @shape `target` is not empty
std::ptrdiff_t receive_some(int socket, std::span<std::byte> target) noexcept;

/// Ends both directions: whoever sends or receives returns. Nothing if the other side was first.
void shut_down(int socket) noexcept;
/// Whoever receives returns, as if the other side had ended the connection; what is sent goes on.
void shut_down_receiving(int socket) noexcept;
/// The other side finds the end behind what was sent.
void shut_down_sending(int socket) noexcept;

/// The failure of a system call.
caf::error system_failure(errc code, const char* call, int native);

} // namespace troupe::detail
