#include "net/endpoint.hpp"

#include "foundation/system_call.hpp"

#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

namespace troupe::detail {

namespace {

std::optional<socket_address> address_of(const sockaddr_storage& x) noexcept {
  socket_address result;
  if (x.ss_family == AF_INET) {
    sockaddr_in v4{};
    std::memcpy(&v4, &x, sizeof v4);
    std::memcpy(result.host.data(), &v4.sin_addr, sizeof v4.sin_addr);
    result.port = ntohs(v4.sin_port);
    return result;
  }
  if (x.ss_family != AF_INET6)
    return std::nullopt;
  sockaddr_in6 v6{};
  std::memcpy(&v6, &x, sizeof v6);
  std::memcpy(result.host.data(), &v6.sin6_addr, sizeof v6.sin6_addr);
  result.port = ntohs(v6.sin6_port);
  result.version = 6;
  return result;
}

template <class F>
caf::expected<socket_address> end_of(const file_descriptor& socket, const char* call, F ask) {
  sockaddr_storage there{};
  socklen_t size = sizeof there;
  if (ask(socket.get(), reinterpret_cast<sockaddr*>(&there), &size) != 0)
    return system_failure(call, errno, "the address of a connection");
  auto result = address_of(there);
  if (!result)
    return make_error(errc::unavailable, "the connection is not an IP connection");
  return *result;
}

struct name_and_port {
  std::string name;
  std::string port;
};

std::optional<name_and_port> split(const std::string& where) {
  const auto colon = where.rfind(':');
  if (colon == std::string::npos || colon == 0)
    return std::nullopt;
  name_and_port result{where.substr(0, colon), where.substr(colon + 1)};
  std::uint16_t port = 0;
  const auto* last = result.port.data() + result.port.size();
  if (auto [end, error] = std::from_chars(result.port.data(), last, port);
      error != std::errc{} || end != last || port == 0)
    return std::nullopt;
  if (result.name.size() > 2 && result.name.front() == '[' && result.name.back() == ']')
    result.name = result.name.substr(1, result.name.size() - 2);
  else if (result.name.find(':') != std::string::npos)
    return std::nullopt;
  return result;
}

caf::error no_name(const std::string& where) {
  return make_error(errc::invalid_argument, "'" + where + "' is not host:port");
}

} // namespace

caf::expected<socket_address> own_end(const file_descriptor& socket) {
  return end_of(socket, "getsockname", ::getsockname);
}

caf::expected<socket_address> other_end(const file_descriptor& socket) {
  return end_of(socket, "getpeername", ::getpeername);
}

std::string host_text(const socket_address& x) {
  auto result = to_string(x);
  result.resize(result.rfind(':'));
  return x.version == 6 ? result.substr(1, result.size() - 2) : result;
}

caf::error check_name(const std::string& where) {
  return split(where) ? caf::error{} : no_name(where);
}

caf::expected<file_descriptor> connect_to_name(const std::string& where,
                                               std::chrono::steady_clock::time_point until) {
  const auto parts = split(where);
  if (!parts)
    return no_name(where);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_ADDRCONFIG;
  addrinfo* found = nullptr;
  if (const int code = ::getaddrinfo(parts->name.c_str(), parts->port.c_str(), &hints, &found);
      code != 0)
    return make_error(errc::unavailable,
                      "the host " + parts->name + " is not known: " + ::gai_strerror(code));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> all{found, ::freeaddrinfo};
  caf::error last = make_error(errc::unavailable, "the host " + parts->name + " has no address");
  std::ptrdiff_t left = 0;
  for (const auto* x = found; x != nullptr; x = x->ai_next)
    ++left;
  // Each address gets a share of the time, so that one without an answer leaves enough for others.
  for (const auto* x = found; x != nullptr; x = x->ai_next, --left) {
    const auto now = std::chrono::steady_clock::now();
    const auto share = now + (until - now) / left;
    sockaddr_storage there{};
    std::memcpy(&there, x->ai_addr, std::min<std::size_t>(x->ai_addrlen, sizeof there));
    const auto address = address_of(there);
    if (!address)
      continue;
    auto socket = connect_to(*address, share);
    if (socket)
      return socket;
    auto why = failure_of(socket.error()).value_or(failure{});
    why.code = errc::unavailable;
    why.detail = "no connection with " + to_string(*address);
    last = make_error(std::move(why));
  }
  return last;
}

} // namespace troupe::detail
