#include "net/socket.hpp"

#include "foundation/system_call.hpp"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <optional>

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

namespace troupe::detail {

namespace {

/// An address in the system's form.
struct native_address {
  sockaddr_storage storage{};
  socklen_t size = 0;

  const sockaddr* get() const noexcept { return reinterpret_cast<const sockaddr*>(&storage); }
};

native_address native_of(const socket_address& x) noexcept {
  native_address result;
  if (x.version == 4) {
    sockaddr_in v4{};
    v4.sin_family = AF_INET;
    v4.sin_port = htons(x.port);
    std::memcpy(&v4.sin_addr, x.host.data(), sizeof v4.sin_addr);
    std::memcpy(&result.storage, &v4, result.size = sizeof v4);
  } else {
    sockaddr_in6 v6{};
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(x.port);
    std::memcpy(&v6.sin6_addr, x.host.data(), sizeof v6.sin6_addr);
    std::memcpy(&result.storage, &v6, result.size = sizeof v6);
  }
  return result;
}

/// Returns none for an address that is not of IP.
std::optional<socket_address> address_of(const sockaddr& x) noexcept {
  socket_address result;
  if (x.sa_family == AF_INET) {
    sockaddr_in v4{};
    std::memcpy(&v4, &x, sizeof v4);
    std::memcpy(result.host.data(), &v4.sin_addr, sizeof v4.sin_addr);
    result.port = ntohs(v4.sin_port);
    return result;
  }
  if (x.sa_family != AF_INET6)
    return std::nullopt;
  sockaddr_in6 v6{};
  std::memcpy(&v6, &x, sizeof v6);
  std::memcpy(result.host.data(), &v6.sin6_addr, sizeof v6.sin6_addr);
  result.port = ntohs(v6.sin6_port);
  result.version = 6;
  return result;
}

int family_of(const socket_address& x) noexcept { return x.version == 4 ? AF_INET : AF_INET6; }

template <class F>
caf::expected<socket_address> end_of(const file_descriptor& socket, const char* call, F ask) {
  sockaddr_storage there{};
  socklen_t size = sizeof there;
  auto& head = reinterpret_cast<sockaddr&>(there);
  if (ask(socket.get(), &head, &size) != 0)
    return system_failure(call, errno, "the address of a connection");
  if (const auto result = address_of(head))
    return *result;
  return make_error(errc::unavailable, "the connection is not an IP connection");
}

int set_no_delay(int socket) noexcept {
  const int on = 1;
  return ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

int set_blocking(int socket) noexcept {
  const int flags = ::fcntl(socket, F_GETFL);
  return flags < 0 ? flags : ::fcntl(socket, F_SETFL, flags & ~O_NONBLOCK);
}

/// Blocks until `socket` is connected, or until the time `until`. @return 0, or `errno`
int wait_connected(int socket, std::chrono::steady_clock::time_point until) noexcept {
  for (;;) {
    if (std::chrono::steady_clock::now() >= until)
      return ETIMEDOUT;
    pollfd wanted{socket, POLLOUT, 0};
    const int there = ::poll(&wanted, 1, poll_limit(until));
    if (there < 0 && errno != EINTR)
      return errno;
    if (there <= 0)
      continue;
    int result = 0;
    socklen_t size = sizeof result;
    return ::getsockopt(socket, SOL_SOCKET, SO_ERROR, &result, &size) == 0 ? result : errno;
  }
}

std::ptrdiff_t receive_at_once(int socket, std::span<std::byte> target, int flags) noexcept {
  for (;;) {
    const auto got = ::recv(socket, target.data(), target.size(), flags | MSG_DONTWAIT);
    if (got >= 0)
      return got;
    if (errno == EAGAIN || errno == EWOULDBLOCK)
      return -1;
    if (errno != EINTR)
      return 0;
  }
}

/// Returns the text of an errno in lower case, for the end of a sentence.
std::string ending_of(int code) {
  auto text = limit_text(code);
  if (text.empty())
    text = system_text(code);
  text[0] = static_cast<char>(std::tolower(static_cast<unsigned char>(text[0])));
  return text;
}

caf::error cannot_listen(const socket_address& at, const char* call, int code) {
  auto detail = "cannot listen on " + to_string(at) + ": " + ending_of(code);
  if (code != EADDRINUSE && code != EADDRNOTAVAIL && code != EACCES)
    detail += std::string{" ("} + call + ')';
  return make_error({.code = errc::unavailable,
                     .detail = std::move(detail),
                     .native_name = system_text(code),
                     .native_code = code});
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

std::string host_text(const socket_address& x) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  static_cast<void>(::inet_ntop(family_of(x), x.host.data(), text.data(), text.size()));
  return text.data(); // there is room for any address
}

std::string to_string(const socket_address& x) {
  const auto host = host_text(x);
  return (x.version == 4 ? host : '[' + host + ']') + ':' + std::to_string(x.port);
}

caf::expected<socket_address> own_end(const file_descriptor& socket) {
  return end_of(socket, "getsockname", ::getsockname);
}

caf::expected<socket_address> other_end(const file_descriptor& socket) {
  return end_of(socket, "getpeername", ::getpeername);
}

caf::expected<socket_address> address_from_string(const std::string& text) {
  socket_address result;
  result.version = text.find(':') == std::string::npos ? 4 : 6;
  if (::inet_pton(family_of(result), text.c_str(), result.host.data()) != 1)
    return make_error(errc::invalid_argument, "'" + text + "' is not a numeric address");
  if (std::ranges::all_of(result.host, [](std::byte x) { return x == std::byte{0}; }))
    return make_error(errc::invalid_argument,
                      "others cannot connect to '" + text + "': name an interface's address");
  return result;
}

caf::expected<file_descriptor> listen_at(socket_address& at) {
  const auto fail = [&](const char* call) { return cannot_listen(at, call, errno); };
  file_descriptor result{
      ::socket(family_of(at), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP)};
  if (!result)
    return fail("socket");
  // Connections of an earlier process that are about to end do not keep the port.
  const int on = 1;
  if (::setsockopt(result.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0)
    return fail("setsockopt");
  const auto address = native_of(at);
  if (::bind(result.get(), address.get(), address.size) != 0)
    return fail("bind");
  if (::listen(result.get(), SOMAXCONN) != 0)
    return fail("listen");
  const auto bound = own_end(result);
  if (!bound)
    return bound.error();
  at.port = bound->port;
  return result;
}

caf::expected<file_descriptor> connect_to(const socket_address& to,
                                          std::chrono::steady_clock::time_point until) {
  const auto fail = [&](const char* call, int native) {
    return system_failure(errc::nccl_error, call, native);
  };
  file_descriptor result{
      ::socket(family_of(to), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP)};
  if (!result)
    return fail("socket", errno);
  const auto address = native_of(to);
  int code = ::connect(result.get(), address.get(), address.size) == 0 ? 0 : errno;
  if (code == EINPROGRESS || code == EINTR)
    code = wait_connected(result.get(), until);
  if (code != 0)
    return fail("connect", code);
  if (set_no_delay(result.get()) != 0)
    return fail("setsockopt", errno);
  if (set_blocking(result.get()) != 0)
    return fail("fcntl", errno);
  return result;
}

caf::error check_name(const std::string& where) {
  return split(where) ? caf::error{} : no_name(where);
}

std::string host_in(const std::string& where) {
  const auto parts = split(where);
  return parts ? parts->name : std::string{};
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

file_descriptor accept_from(const file_descriptor& listener) {
  for (;;) {
    file_descriptor result{::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC)};
    if (result && set_no_delay(result.get()) != 0)
      continue; // closed already
    // Skip connections that ended before they were accepted.
    if (result || (errno != EINTR && errno != ECONNABORTED))
      return result;
  }
}

int send_all(int socket, std::span<const std::span<const std::byte>> blocks) noexcept {
  constexpr std::size_t at_once = 64;
  std::array<iovec, at_once> vectors{};
  std::size_t first = 0;  // first block that is not fully sent
  std::size_t offset = 0; // bytes of it that are sent
  while (first < blocks.size()) {
    const auto count = std::min(at_once, blocks.size() - first);
    for (std::size_t i = 0; i < count; ++i) {
      const auto rest = blocks[first + i].subspan(i == 0 ? offset : 0);
      // The system does not write to this memory.
      vectors[i] = {const_cast<std::byte*>(rest.data()), rest.size()};
    }
    msghdr message{};
    message.msg_iov = vectors.data();
    message.msg_iovlen = count;
    const auto sent = ::sendmsg(socket, &message, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR)
        continue;
      return errno;
    }
    offset += static_cast<std::size_t>(sent);
    while (first < blocks.size() && offset >= blocks[first].size())
      offset -= blocks[first++].size();
  }
  return 0;
}

bool send_at_once(int socket, std::span<const std::byte> bytes) noexcept {
  ssize_t sent = 0;
  do
    sent = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  while (sent < 0 && errno == EINTR);
  return sent == static_cast<ssize_t>(bytes.size());
}

bool receive_all(int socket, std::span<const std::span<std::byte>> blocks) noexcept {
  for (auto rest : blocks)
    while (!rest.empty()) {
      const auto got = ::recv(socket, rest.data(), rest.size(), MSG_WAITALL);
      if (got < 0 && errno == EINTR)
        continue;
      if (got <= 0)
        return false;
      rest = rest.subspan(static_cast<std::size_t>(got));
    }
  return true;
}

std::ptrdiff_t receive_some(int socket, std::span<std::byte> target) noexcept {
  return receive_at_once(socket, target, 0);
}

std::ptrdiff_t look_at(int socket, std::span<std::byte> target) noexcept {
  return receive_at_once(socket, target, MSG_PEEK);
}

int wake_at(int socket, std::size_t bytes) noexcept {
  const auto number = static_cast<int>(bytes);
  return ::setsockopt(socket, SOL_SOCKET, SO_RCVLOWAT, &number, sizeof number) == 0 ? 0 : errno;
}

void close_at_once(file_descriptor socket) noexcept {
  const linger none{.l_onoff = 1, .l_linger = 0};
  // If it fails, the connection is closed in good order.
  static_cast<void>(::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &none, sizeof none));
}

void shut_down(int socket) noexcept { static_cast<void>(::shutdown(socket, SHUT_RDWR)); }

void shut_down_receiving(int socket) noexcept { static_cast<void>(::shutdown(socket, SHUT_RD)); }

void shut_down_sending(int socket) noexcept { static_cast<void>(::shutdown(socket, SHUT_WR)); }

caf::error system_failure(errc code, const char* call, int native) {
  auto why = *failure_of(system_failure(call, native, {}));
  why.code = code;
  return make_error(std::move(why));
}

} // namespace troupe::detail
