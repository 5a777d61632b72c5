#include "worker/protocol/message_socket.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <string>

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

namespace troupe::detail {

namespace {

constexpr std::size_t control_bytes = CMSG_SPACE(message_socket::most_descriptors * sizeof(int));

/// Buffer for a control message.
struct alignas(cmsghdr) control_buffer {
  std::array<std::byte, control_bytes> bytes{};
};

caf::expected<int> option(int socket, int name, const char* what) {
  int value = 0;
  socklen_t size = sizeof value;
  if (::getsockopt(socket, SOL_SOCKET, name, &value, &size) != 0)
    return make_error(errc::invalid_argument, "descriptor " + std::to_string(socket) + " has no " +
                                                  what + " of a socket: " + system_text(errno));
  return value;
}

/// Returns the descriptors of a received message.
std::vector<file_descriptor> take_descriptors(msghdr& header) {
  std::vector<file_descriptor> result;
  for (auto* x = CMSG_FIRSTHDR(&header); x != nullptr; x = CMSG_NXTHDR(&header, x)) {
    if (x->cmsg_level != SOL_SOCKET || x->cmsg_type != SCM_RIGHTS)
      continue;
    const auto count = (x->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int native = -1;
      std::memcpy(&native, CMSG_DATA(x) + i * sizeof native, sizeof native);
      result.emplace_back(native);
    }
  }
  return result;
}

} // namespace

caf::expected<std::pair<message_socket, message_socket>> message_socket::pair() {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0)
    return system_failure("socketpair", errno, "no connection between processes");
  file_descriptor first{ends[0]};
  file_descriptor second{ends[1]};
  if (!first || !second)
    return system_failure("fcntl(F_DUPFD_CLOEXEC)", errno, "no connection between processes");
  auto first_wake = wake_up::create();
  if (!first_wake)
    return first_wake.error();
  auto second_wake = wake_up::create();
  if (!second_wake)
    return second_wake.error();
  return std::pair{message_socket{std::move(first), std::move(*first_wake)},
                   message_socket{std::move(second), std::move(*second_wake)}};
}

caf::expected<message_socket> message_socket::adopt(int end) {
  const auto domain = option(end, SO_DOMAIN, "domain");
  if (!domain)
    return domain.error();
  const auto type = option(end, SO_TYPE, "type");
  if (!type)
    return type.error();
  if (*domain != AF_UNIX || *type != SOCK_SEQPACKET)
    return make_error(errc::invalid_argument,
                      "descriptor " + std::to_string(end) + " is not a message socket");
  auto wake = wake_up::create();
  if (!wake)
    return wake.error();
  if (::fcntl(end, F_SETFD, FD_CLOEXEC) != 0)
    return system_failure("fcntl(F_SETFD)", errno, "cannot set close-on-exec on a message socket");
  file_descriptor own{end};
  if (!own)
    return system_failure("fcntl(F_DUPFD_CLOEXEC)", errno, "no file descriptor is free");
  return message_socket{std::move(own), std::move(*wake)};
}

/// Waits for `events`. An interruption takes precedence over readiness.
caf::expected<message_socket::wait_result> message_socket::wait(short events,
                                                                time_limit until) const {
  std::array<pollfd, 2> wanted{{{end_.get(), events, 0}, {interrupt_.native(), POLLIN, 0}}};
  while (true) {
    const int limit = poll_limit(until);
    const int ready = ::poll(wanted.data(), wanted.size(), limit);
    if (ready < 0 && errno != EINTR)
      return system_failure("poll", errno, "cannot wait for a message socket");
    if (ready > 0)
      return wanted[1].revents != 0 ? wait_result::interrupted : wait_result::ready;
    if (ready == 0 && limit == 0)
      return wait_result::late;
  }
}

bool message_socket::is_at_end() const noexcept {
  pollfd x{end_.get(), POLLRDHUP, 0};
  return ::poll(&x, 1, 0) > 0 && (x.revents & (POLLRDHUP | POLLHUP)) != 0;
}

caf::error message_socket::send(std::span<const std::byte> bytes, std::span<const int> descriptors,
                                time_limit until) {
  if (bytes.empty()) // the peer could read it as the end of the connection
    return make_error(errc::invalid_argument, "a message has at least one byte");
  if (descriptors.size() > most_descriptors)
    return make_error(errc::invalid_argument, std::to_string(descriptors.size()) +
                                                  " descriptors in a message: the limit is " +
                                                  std::to_string(most_descriptors));
  iovec content{const_cast<std::byte*>(bytes.data()), bytes.size()};
  control_buffer control;
  msghdr header{};
  header.msg_iov = &content;
  header.msg_iovlen = 1;
  if (!descriptors.empty()) {
    header.msg_control = control.bytes.data();
    header.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    auto* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(rights), descriptors.data(), descriptors.size_bytes());
  }
  while (true) {
    const auto state = wait(POLLOUT, until);
    if (!state)
      return state.error();
    if (*state == wait_result::interrupted)
      return make_error(errc::unavailable, "the message socket was interrupted");
    if (*state == wait_result::late)
      return make_error(errc::deadline_exceeded, "the peer did not read in time");
    if (::sendmsg(end_.get(), &header, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0)
      return {};
    if (errno == EMSGSIZE)
      return make_error(errc::out_of_range,
                        std::to_string(bytes.size()) + " bytes are too many for a message");
    if (errno != EAGAIN && errno != EINTR)
      return system_failure("sendmsg", errno, "the message was not sent");
  }
}

caf::expected<received> message_socket::receive(std::span<std::byte> into, std::size_t descriptors,
                                                time_limit until) {
  while (true) {
    const auto state = wait(POLLIN, until);
    if (!state)
      return state.error();
    received result;
    if (*state == wait_result::interrupted) {
      result.what = received::kind::interrupted;
      return result;
    }
    if (*state == wait_result::late)
      return make_error(errc::deadline_exceeded, "no message arrived in time");
    iovec content{into.data(), into.size()};
    control_buffer control;
    msghdr header{};
    header.msg_iov = &content;
    header.msg_iovlen = 1;
    header.msg_control = control.bytes.data();
    header.msg_controllen = control.bytes.size();
    const auto size = ::recvmsg(end_.get(), &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT | MSG_TRUNC);
    // ECONNRESET: the peer ended before it read everything. Its own messages can still be read.
    if (size < 0 && (errno == EAGAIN || errno == EINTR || errno == ECONNRESET))
      continue;
    if (size < 0)
      return system_failure("recvmsg", errno, "no message can be received");
    if (size == 0 && is_at_end()) {
      result.what = received::kind::end;
      return result;
    }
    result.descriptors = take_descriptors(header);
    if ((header.msg_flags & MSG_CTRUNC) != 0)
      result.descriptors.clear(); // too few free descriptors in this process
    result.size_bytes = static_cast<std::size_t>(size);
    if (result.size_bytes > into.size())
      return make_error(errc::out_of_range, "a message had " + std::to_string(size) +
                                                " bytes: the buffer has " +
                                                std::to_string(into.size()));
    if (result.descriptors.size() > descriptors) {
      result.refused = result.descriptors.size() - descriptors;
      result.descriptors.resize(descriptors);
    }
    return result;
  }
}

} // namespace troupe::detail
