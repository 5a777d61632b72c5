#include "net/endpoint.hpp"

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include <netdb.h>
#include <sys/socket.h>

namespace troupe::detail {

namespace {

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
    const auto address = address_of(*x->ai_addr);
    if (!address)
      continue;
    auto socket = connect_to(*address, share);
    if (socket)
      return socket;
    auto why = *failure_of(socket.error());
    why.code = errc::unavailable;
    why.detail = "no connection with " + to_string(*address);
    last = make_error(std::move(why));
  }
  return last;
}

} // namespace troupe::detail
