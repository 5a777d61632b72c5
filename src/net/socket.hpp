/// TCP sockets, and the transfer of bytes through them.
#pragma once

#include "foundation/file_descriptor.hpp"
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

/// The address of a listening socket; its bytes mean the same in every process.
struct socket_address {
  std::array<std::byte, 16> host{}; ///< in network order; IPv4 uses the first four
  std::uint16_t port = 0;
  std::uint16_t version = 4; ///< of IP: 4 or 6

  friend bool operator==(const socket_address&, const socket_address&) = default;
};

/// Returns the address without the port, as `address_from_string` takes it.
std::string host_text(const socket_address& x);
std::string to_string(const socket_address& x);

/// Parses the numeric address of one host, without a port.
/// @errors errc::invalid_argument: not the numeric address of one host
caf::expected<socket_address> address_from_string(const std::string& text);

/// Listens on the port in `at`. If the port is 0, chooses a free one and stores it there.
/// @errors errc::unavailable
caf::expected<file_descriptor> listen_at(socket_address& at);

/// Return the address of this end, or of the other end, of a connection.
/// @errors errc::unavailable
caf::expected<socket_address> own_end(const file_descriptor& socket);
caf::expected<socket_address> other_end(const file_descriptor& socket);

/// @errors errc::nccl_error: no process listens there, or no connection before `until`
caf::expected<file_descriptor> connect_to(const socket_address& to,
                                          std::chrono::steady_clock::time_point until);

/// Connects to "host:port", where host is a name or an address; an IPv6 address is in brackets.
/// @errors errc::invalid_argument: not of this form; errc::unavailable: no such host, or no
///         connection
caf::expected<file_descriptor> connect_to_name(const std::string& where,
                                               std::chrono::steady_clock::time_point until);

/// Checks the form of a text for `connect_to_name`.
/// @errors errc::invalid_argument
caf::error check_name(const std::string& where);

/// Returns the host in a text for `connect_to_name`, without brackets.
std::string host_in(const std::string& where);

/// Accepts a connection. Returns none, with `errno`, if there is none or too many files are open.
/// @shape `listener` does not block; the result does
file_descriptor accept_from(const file_descriptor& listener);

/// Sends all blocks, and blocks until then.
/// @return 0, or `errno`
int send_all(int socket, std::span<const std::span<const std::byte>> blocks) noexcept;

/// Sends `bytes` without blocking. Returns false if only a part was sent, or nothing.
bool send_at_once(int socket, std::span<const std::byte> bytes) noexcept;

/// Fills all blocks, and blocks until then. Returns false if the other side has closed the
/// connection, or it is lost.
bool receive_all(int socket, std::span<const std::span<std::byte>> blocks) noexcept;

/// Reads the available bytes. Returns their number; 0: the connection is over; -1: none yet.
/// @shape `target` is not empty
std::ptrdiff_t receive_some(int socket, std::span<std::byte> target) noexcept;

/// As `receive_some`, but leaves the bytes for the next call.
std::ptrdiff_t look_at(int socket, std::span<std::byte> target) noexcept;
/// Makes `poll` report input only when so many bytes have arrived, or the connection is over.
/// @return 0, or `errno`
int wake_at(int socket, std::size_t bytes) noexcept;

/// Closes the connection at once. Nothing that was not sent yet is sent, and the system keeps
/// nothing of it.
void close_at_once(file_descriptor socket) noexcept;

/// Ends both directions: blocked sends and receives return. Does nothing if the other side was
/// first.
void shut_down(int socket) noexcept;
/// Makes receives return as if the other side had closed the connection. Sends still work.
void shut_down_receiving(int socket) noexcept;
/// Closes the sending direction. The other side sees the end after all that was sent.
void shut_down_sending(int socket) noexcept;

/// Returns the failure of a system call.
caf::error system_failure(errc code, const char* call, int native);

} // namespace troupe::detail
